"""One request with the one retry layer. `_retry` decides, this module acts, `errors` says what is retryable."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping

from tinkex import events
from tinkex.client._calls.retry import RetryPolicy, retry_after
from tinkex.client._http.transport import Answer
from tinkex.client._runtime import tracing
from tinkex.client._runtime.link import Connection
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIConnectionError, APIError, APIStatusError, DeadlineExceeded, Response, status_error
from tinkex.wire import json_codec
from tinkex.wire.body import Body
from tinkex.wire.endpoints import AUTH_TOKEN, Endpoint

log = logging.getLogger("tinkex.http")


async def call(
    connection: Connection,
    endpoint: Endpoint,
    body: Body | None = None,
    *,
    operation: Operation,
    path: str | None = None,
    headers: Mapping[str, str] | None = None,
    attempts: int | None = None,
    timeout_s: float | None = None,
) -> Answer:
    """Send until answered: the same bytes and the same idempotency key on every attempt."""
    config = connection.config
    policy = RetryPolicy(max_attempts=attempts or config.max_retries, budget_s=config.unreachable_s)
    started = connection.clock.now()
    key = connection.idempotency_key() if endpoint.method != "GET" else None
    attempt = 0
    while True:
        attempt += 1
        operation.attempts = attempt
        try:
            answer = await send(
                connection, endpoint, body, path=path, headers=headers, key=key, attempt=attempt, timeout_s=timeout_s
            )
            if answer.status < 400:
                operation.last_answer_at = connection.clock.now()
                _log_deprecation(answer, endpoint)
                return answer
            error: APIError = error_of(connection, answer, endpoint)
        except APIConnectionError as problem:
            error = problem
        operation.last_error = f"{type(error).__name__}: {error}"
        if not error.retryable:
            raise error
        elapsed_s = max(connection.clock.now() - started, connection.silent_s(operation))
        hint_s = hint_of(error, connection)
        delay_s = policy.delay(attempt - 1, elapsed_s, hint_s, random.random)
        if delay_s is None:
            raise _gave_up(error, endpoint, attempt, elapsed_s)
        connection.stats.retries += 1
        connection.say_unreachable(error, attempt)
        if events.wanted("retry"):
            events.emit("retry", events.RetryEvent(endpoint.name, attempt, delay_s, operation.last_error))
        await connection.clock.sleep(delay_s)


async def send(
    connection: Connection,
    endpoint: Endpoint,
    body: Body | None,
    *,
    path: str | None = None,
    headers: Mapping[str, str] | None = None,
    key: str | None = None,
    attempt: int = 1,
    timeout_s: float | None = None,
) -> Answer:
    """One exchange, no retry: an answer of any status, or APIConnectionError.

    A token that ran out between two renewals (after a laptop's sleep, say) is traded anew and the request repeated.
    """
    auth = connection.auth
    used = auth.key if endpoint is AUTH_TOKEN else auth.header
    sent = connection.base_headers | {"x-api-key": used}
    if body is not None:
        sent["content-type"] = body.content_type
        if body.content_encoding:
            sent["content-encoding"] = body.content_encoding
    if key:
        sent["x-idempotency-key"] = key
    if headers:
        sent.update(headers)
    tracing.inject(sent)
    content = b"" if body is None else body.content
    stats = connection.stats
    stats.requests += 1
    stats.sent_bytes += len(content)
    started = connection.clock.now()
    url = f"{connection.config.base_url}{path or endpoint.path}"
    patience_s = timeout_s or connection.config.timeout_s
    try:
        answer = await connection.transport.send(endpoint.pool, endpoint.method, url, sent, content, patience_s)
        if answer.status == 401 and sent["x-api-key"] == used != auth.key and await auth.renewed(connection, used):
            sent["x-api-key"] = auth.header
            answer = await connection.transport.send(endpoint.pool, endpoint.method, url, sent, content, patience_s)
    except APIConnectionError as problem:
        if events.wanted("request"):
            elapsed = connection.clock.now() - started
            record = events.RequestEvent(endpoint.name, 0, attempt, elapsed, len(content), 0, str(problem))
            events.emit("request", record)
        raise
    stats.received_bytes += len(answer.content)
    if answer.status < 500:
        connection.last_heard_at = connection.clock.now()
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s %d in %.3f s", endpoint.name, answer.status, connection.clock.now() - started)
    if events.wanted("request"):
        elapsed = connection.clock.now() - started
        events.emit(
            "request",
            events.RequestEvent(endpoint.name, answer.status, attempt, elapsed, len(content), len(answer.content)),
        )
    return answer


def error_of(connection: Connection, answer: Answer, endpoint: Endpoint) -> APIStatusError:
    """The typed error of an answer. Neither the request's headers nor a key that the service repeats are in it."""
    content = answer.content
    config = connection.config
    for secret in {config.api_key, connection.auth.header, config.cf_client_secret or ""} - {""}:
        content = content.replace(secret.encode(), b"***")
    kind = answer.headers.get("content-type") or ""
    body: object = None
    if content:
        try:
            body = json_codec.decode(content)
        except ValueError:
            body = content[:500].decode("utf-8", "replace")
            if "html" in kind:
                body = f"an HTML page, probably from a proxy: {body[:120]!r}"
    return status_error(Response(answer.status, dict(answer.headers.items()), endpoint.path), body)


_noted: set[str] = set()


def _log_deprecation(answer: Answer, endpoint: Endpoint) -> None:
    """A service may say that a call will go away: log each such note once."""
    note = answer.headers.get("x-deprecation-note")
    if note and note not in _noted:
        _noted.add(note)
        level = logging.ERROR if answer.headers.get("x-deprecation-level") == "error" else logging.WARNING
        log.log(level, "%s: the service says: %s", endpoint.name, note)


def hint_of(error: APIError, connection: Connection) -> float | None:
    """The pause that the service asked for, if it answered and asked."""
    if isinstance(error, APIStatusError):
        return retry_after(error.response.headers, connection.clock.wall())
    return None


def _gave_up(error: APIError, endpoint: Endpoint, attempts: int, elapsed_s: float) -> Exception:
    """After several attempts say so; keep the typed error as the cause and its type where it has a status."""
    text = f"{endpoint.name}: gave up after {attempts} attempts in {elapsed_s:.0f} s. Last problem: {error}"
    if isinstance(error, APIStatusError):
        error.args = (text,)
        error.message = text
        return error
    if isinstance(error, APIConnectionError):
        return APIConnectionError(None, text)
    return DeadlineExceeded(text)
