"""Hands one training request to the service, in the dialect that the service reads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from tinkex.client._calls.attempts import call
from tinkex.client._calls.decode import read_accepted
from tinkex.client._calls.handshake import ready
from tinkex.client._calls.poll import poll
from tinkex.client._http.transport import HTTPResponse
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIStatusError
from tinkex.wire import endpoints
from tinkex.wire.body import PROTOBUF, Body, compress
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

INLINE_BYTES = 1 << 18
"""Bodies up to about this size are encoded on the loop (well under a millisecond); larger ones in a worker thread."""
Encode = Callable[[int, Dialect], Body]
"""Encodes a request, given its sequence number and the dialect."""
Collect = Callable[[], Coroutine[Any, Any, Any]]
"""Waits for the result of a request that the service has accepted."""


async def submit(
    link: ServiceLink,
    operation: Operation,
    endpoint: Endpoint,
    seq_id: int,
    encode: Encode,
    size_hint: int = 0,
    datums: int | None = None,
    notes: Mapping[str, str] | None = None,
) -> Collect:
    """Send one request until it is accepted; return the function that waits for its result.

    `datums` is how many the request has, if it is a pass: its result has no more outputs. `notes` are headers about the
    request for services that keep them; they change nothing of what it does.
    """
    dialect = await ready(link)
    headers = notes if link.extensions.get("run_records") else None
    operation.state = "submitting"
    body = await _encoded(link, encode, seq_id, dialect, size_hint)
    try:
        response = await _sent(link, operation, endpoint, dialect, body, headers)
        link.is_proto_proven |= body.content_type == PROTOBUF
    except APIStatusError as rejection:
        if body.content_type != PROTOBUF or link.is_proto_proven or rejection.status_code not in (400, 415, 422):
            raise
        # The first protobuf body: perhaps the service reads only JSON. Same seq_id: it cannot run twice.
        body = await _encoded(link, encode, seq_id, Dialect.JSON, size_hint)
        try:
            response = await _sent(link, operation, endpoint, Dialect.JSON, body, headers)
        except APIStatusError:
            raise rejection from None  # rejected in both dialects: report the first rejection
        link.dialect = Dialect.JSON
    accepted = await read_accepted(response.content)
    operation.state = "accepted"
    operation.accepted_at = link.clock.now()
    operation.request_id = accepted.request_id
    return functools.partial(poll, link, operation, endpoint, accepted.request_id, asked=datums)


async def _sent(
    link: ServiceLink,
    operation: Operation,
    endpoint: Endpoint,
    dialect: Dialect,
    body: Body,
    headers: Mapping[str, str] | None,
) -> HTTPResponse:
    if dialect is Dialect.PROTO and endpoint is endpoints.FORWARD:
        endpoint = endpoints.FORWARD_BACKWARD  # the newer dialect says "forward only" inside the body
    return await call(link, endpoint, body, operation=operation, headers=headers, is_queued=True)


async def _encoded(link: ServiceLink, encode: Encode, seq_id: int, dialect: Dialect, size_hint: int) -> Body:
    def make() -> Body:
        body = encode(seq_id, dialect)
        if link.server.proto_compress_fwdbwd and body.content_type == PROTOBUF:
            body = compress(body)
        return body

    if size_hint <= INLINE_BYTES:
        return make()
    return await asyncio.get_running_loop().run_in_executor(None, make)
