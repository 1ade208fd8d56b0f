"""The handshake with a service: which dialect it speaks, what limits it sets, and whether it wants tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tinkex._version import PROTOCOL_VERSION
from tinkex.client._calls.attempts import call
from tinkex.client._calls.decode import read_object, read_value
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIError, AuthenticationError, NotFoundError, TinkexError
from tinkex.types import ClientConfigResponse, ClientDynamicConfigResponse
from tinkex.wire import endpoints, requests
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Pool


async def ready(link: ServiceLink) -> Dialect:
    """Make the handshake, once for all callers, and return the dialect."""
    if link.dialect is None:
        if link.handshake is None or link.handshake.done():
            link.handshake = link.loop.spawn(_error_of(_shake_hands(link)))
        # Shielded: one caller's cancellation must not stop the others' handshake.
        error = await asyncio.shield(link.handshake)
        if error is not None:
            raise error
    assert link.dialect is not None
    return link.dialect


async def _shake_hands(link: ServiceLink) -> None:
    operation = Operation("client_config", link.clock.now())
    body = requests.client_config(PROTOCOL_VERSION)
    try:
        response = await call(link, endpoints.CLIENT_CONFIG, body, operation=operation)
    except NotFoundError:
        link.limiter.samples.count = _max_samples(link)
        link.dialect = Dialect.JSON  # a service from before 0.18: JSON only, default limits
        return
    link.server = await read_value(ClientConfigResponse, response.content)
    link.limiter.dispatch.limit_bytes = link.server.sample_dispatch_bytes_semaphore_size
    link.limiter.samples.count = _max_samples(link)
    link.limiter.results.limit_bytes = link.server.inflight_response_bytes_semaphore_size
    if link.server.pjwt_auth_enabled:
        await link.auth.start(lambda: _fetch_token(link), link.loop, link.clock)
    try:
        response = await call(link, endpoints.CLIENT_DYNAMIC_CONFIG, body, operation=operation, max_attempts=1)
        link.dynamic = await read_value(ClientDynamicConfigResponse, response.content)
    except APIError:
        pass  # optional by design: its defaults switch everything off
    import tinkex.wire.proto_codec  # heavy: now, not on the first result in the middle of a burst

    assert tinkex.wire.proto_codec
    link.dialect = Dialect.PROTO


async def _fetch_token(link: ServiceLink) -> str:
    operation = Operation("auth_token", link.clock.now())
    response = await call(link, endpoints.AUTH_TOKEN, requests.auth_token(), operation=operation, max_attempts=3)
    token = (await read_object(response.content)).get("jwt")
    if not isinstance(token, str) or not token or not (token.isascii() and token.isprintable()):
        raise AuthenticationError("The service asked for token sign-in but gave no token. Check the API key.")
    return token


def _max_samples(link: ServiceLink) -> int:
    """Without TLS there is no HTTP/2: a sample that waits occupies a connection, and more could not be asked for."""
    limit = link.server.sample_max_concurrent_requests
    if link.config.base_url.startswith("http:") and not link.server.sample_use_retrieve_futures:
        limit = min(limit, link.transport.limit_of(Pool.RETRIEVE_SAMPLES))
    return limit


async def _error_of(work: Coroutine[Any, Any, None]) -> TinkexError | None:
    """Run shared work; return its failure to those that wait for it instead of logging it."""
    try:
        await work
    except TinkexError as error:
        return error
    return None
