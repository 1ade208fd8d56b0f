"""One exchange with the service, without retries: headers, credential, statistics and the `request` event.

Every request of the SDK goes through here: calls, polls, samples, streams, downloads, heartbeats. `attempts` repeats
what failed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tinkex import events
from tinkex.client._http.transport import HTTPResponse, StreamedResponse
from tinkex.client._runtime import tracing
from tinkex.client._runtime.link import ServiceLink
from tinkex.errors import APIError, APIResponseValidationError, APIStatusError, Response, status_error
from tinkex.wire import json_codec, sse
from tinkex.wire.body import Body
from tinkex.wire.endpoints import AUTH_TOKEN, Endpoint, Pool

log = logging.getLogger("tinkex.http")
SHOWN_ERROR_BYTES = 1 << 18
"""Of the body of an error response: what is longer is shown by its beginning."""
DOWNLOAD = Endpoint("download", "GET", "", Pool.TRAIN)
"""A file at a signed address, which may be on another host: neither the key nor our headers are sent there."""
Sent = TypeVar("Sent", HTTPResponse, StreamedResponse)


async def send(
    link: ServiceLink,
    endpoint: Endpoint,
    body: Body | None = None,
    *,
    path: str | None = None,
    headers: Mapping[str, str] | None = None,
    key: str | None = None,
    attempt: int = 1,
    timeout_s: float | None = None,
    follow: bool = True,
    raises: bool = False,
) -> HTTPResponse:
    """Send once and return the response. Raises APIConnectionError if there is none.

    Any status is a response; with `raises` an error status is raised as its APIStatusError.
    """
    request = _service_request(link, endpoint, body, path, headers, key, attempt)
    transmit = link.transport.send if follow else functools.partial(link.transport.send, follow=False)
    response = await request.send(transmit, timeout_s or link.config.timeout_s)
    link.stats.received_bytes += len(response.content)
    request.report(response.status, len(response.content))
    if raises:
        if response.status >= 400:
            raise response_error(link, response, endpoint)
        _log_deprecation(response.headers, endpoint)
    return response


async def open_events(
    link: ServiceLink, endpoint: Endpoint, body: Body, *, key: str, attempt: int, bearer: str | None = None
) -> StreamedResponse:
    """Send once and return the response when the first byte of its body is here; `close` it.

    Up to that byte nothing was handed to the caller: the request may be sent again. From then on it may not. An error
    status is raised. `bearer` is sent as OpenAI's clients send a key, instead of our own header.
    """
    headers = {"accept": "text/event-stream"}
    response = await _opened(link, _service_request(link, endpoint, body, None, headers, key, attempt, bearer))
    try:
        if response.status >= 400:
            raise response_error(link, await response.read(), endpoint)
        _log_deprecation(response.headers, endpoint)
        await response.wait_for_body()
    except BaseException:
        response.close()
        raise
    return response


async def read_events(link: ServiceLink, response: StreamedResponse) -> AsyncIterator[sse.Event]:
    """Yield the server-sent events of a response as they arrive. All together have a limit, `max_response_bytes`."""
    limit_bytes = link.config.max_response_bytes
    decoder = sse.SSEDecoder(limit_bytes)
    async for data in response.chunks():
        if response.received_bytes > limit_bytes:
            raise APIResponseValidationError(
                message=f"The service's stream has more than {limit_bytes:,} bytes. If it is right to send so much, "
                "raise max_response_bytes."
            )
        for event in decoder.feed(data):
            yield event


async def open_download(link: ServiceLink, url: str, headers: dict[str, str], attempt: int) -> StreamedResponse:
    """Send one GET to a signed address and return the response, whatever its status; `close` it."""
    return await _opened(link, OutgoingRequest(link, DOWNLOAD, url, headers, b"", attempt))


async def _opened(link: ServiceLink, request: OutgoingRequest) -> StreamedResponse:
    response = await request.send(link.transport.open, link.config.timeout_s)

    def report() -> None:
        link.stats.received_bytes += response.received_bytes
        request.report(response.status, response.received_bytes)

    response.on_close = report
    return response


def _service_request(
    link: ServiceLink,
    endpoint: Endpoint,
    body: Body | None,
    path: str | None,
    headers: Mapping[str, str] | None,
    key: str | None,
    attempt: int,
    bearer: str | None = None,
) -> OutgoingRequest:
    credential: str | None = None
    if bearer is not None:
        all_headers = link.base_headers | {"authorization": f"Bearer {bearer}"}
    else:
        credential = link.auth.key if endpoint is AUTH_TOKEN else link.auth.header
        all_headers = link.base_headers | {"x-api-key": credential}
    if body is not None:
        all_headers["content-type"] = body.content_type
        if body.content_encoding:
            all_headers["content-encoding"] = body.content_encoding
    if key:
        all_headers["x-idempotency-key"] = key
    if headers:
        all_headers.update(headers)
    tracing.inject(all_headers)
    url = f"{link.config.base_url}{path or endpoint.path}"
    return OutgoingRequest(link, endpoint, url, all_headers, b"" if body is None else body.content, attempt, credential)


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """One request on its way: counted when it is made, reported when it has ended."""

    link: ServiceLink
    endpoint: Endpoint
    url: str
    headers: dict[str, str]
    content: bytes
    attempt: int
    credential: str | None = None
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.link.clock.now()
        self.link.stats.requests += 1
        self.link.stats.sent_bytes += len(self.content)

    async def send(self, transmit: Callable[..., Awaitable[Sent]], timeout_s: float) -> Sent:
        """Transmit; once more with a new token if the token ran out between two renewals (after a laptop's sleep)."""
        endpoint, url, headers = self.endpoint, self.url, self.headers
        try:
            response = await transmit(endpoint.pool, endpoint.method, url, headers, self.content, timeout_s)
            if response.status == 401 and await self._has_new_token():
                if isinstance(response, StreamedResponse):
                    response.close()
                response = await transmit(endpoint.pool, endpoint.method, url, headers, self.content, timeout_s)
        except APIError as error:
            self.report(0, 0, str(error))
            raise
        if response.status < 500:
            self.link.last_heard_at = self.link.clock.now()
        return response

    async def _has_new_token(self) -> bool:
        """Whether the credential was a token that has been replaced meanwhile; the headers then have the new one."""
        auth, used = self.link.auth, self.credential
        # A caller's own `x-api-key` (a weights access token) is left alone, and the key itself cannot be renewed.
        if used is None or used == auth.key or self.headers["x-api-key"] != used or not await auth.renewed(used):
            return False
        self.headers["x-api-key"] = auth.header
        return True

    def report(self, status: int, received_bytes: int, error: str = "") -> None:
        """Emit the `request` event, and a log line for those who debug."""
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s %d in %.3f s", self.endpoint.name, status, self.link.clock.now() - self.started)
        if events.wanted("request"):
            seconds = self.link.clock.now() - self.started
            sent_bytes = len(self.content)
            events.emit(
                "request",
                events.RequestEvent(
                    self.endpoint.name, status, self.attempt, seconds, sent_bytes, received_bytes, error
                ),
            )


def response_error(link: ServiceLink, response: HTTPResponse, endpoint: Endpoint) -> APIStatusError:
    """Return the typed error of a response. It holds neither request headers nor a key that the service repeats."""
    content = response.content
    if is_long := len(content) > SHOWN_ERROR_BYTES:
        content = content[:SHOWN_ERROR_BYTES]
    config = link.config
    for secret in {config.api_key, link.auth.header, config.cf_client_secret or ""} - {""}:
        content = content.replace(secret.encode(), b"***")
    content_type = response.headers.get("content-type") or ""
    body: object = None
    if content:
        try:
            if is_long:
                raise ValueError("too long to be shown")
            body = json_codec.decode_bounded(content)
        except ValueError:
            body = content[:500].decode("utf-8", "replace")
            if "html" in content_type:
                body = f"an HTML page, probably from a proxy: {body[:120]!r}"
    return status_error(Response(response.status, dict(response.headers.items()), endpoint.path), body)


_logged_notes: set[str] = set()


def _log_deprecation(headers: Mapping[str, str], endpoint: Endpoint) -> None:
    """A service may say that a call will go away: log each such note once."""
    note = headers.get("x-deprecation-note")
    if note and note not in _logged_notes:
        _logged_notes.add(note)
        level = logging.ERROR if headers.get("x-deprecation-level") == "error" else logging.WARNING
        log.log(level, "%s: the service says: %s", endpoint.name, note)
