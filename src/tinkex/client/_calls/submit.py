"""Hands one training request to the service in the dialect it reads, and gives back the wait for its result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tinkex.client._calls.call import call
from tinkex.client._calls.poll import poll
from tinkex.client._http.transport import Answer
from tinkex.client._runtime.link import Connection
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIStatusError
from tinkex.wire import endpoints, envelope
from tinkex.wire.body import PROTOBUF, Body, compress
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

INLINE_BYTES = 1 << 18
"""Bodies up to about this size are encoded on the loop (well under a millisecond); larger ones in a worker thread."""


async def submit(
    connection: Connection,
    operation: Operation,
    endpoint: Endpoint,
    seq_id: int,
    encode: Callable[[int, Dialect], Body],
    size_hint: int = 0,
) -> Coroutine[Any, Any, Any]:
    """Send one request until it is accepted; returns a coroutine that waits for its result."""
    dialect = await connection.ready()
    operation.state = "submitting"
    body = await _encoded(connection, encode, seq_id, dialect, size_hint)
    try:
        answer = await _sent(connection, operation, endpoint, dialect, body)
        connection.is_proto_proven |= body.content_type == PROTOBUF
    except APIStatusError as refusal:
        if body.content_type != PROTOBUF or connection.is_proto_proven or refusal.status_code not in (400, 415, 422):
            raise
        answer = await _again_as_json(connection, operation, endpoint, seq_id, encode, size_hint, refusal)
    accepted = envelope.read_accepted(answer.content)
    operation.state = "accepted"
    operation.accepted_at = connection.clock.now()
    operation.request_id = accepted.request_id
    return poll(connection, operation, endpoint, accepted.request_id)


async def _again_as_json(
    connection: Connection,
    operation: Operation,
    endpoint: Endpoint,
    seq_id: int,
    encode: Callable[[int, Dialect], Body],
    size_hint: int,
    refusal: APIStatusError,
) -> Answer:
    """The first protobuf body was refused: perhaps the service reads only JSON. Same seq_id: it cannot run twice."""
    body = await _encoded(connection, encode, seq_id, Dialect.JSON, size_hint)
    try:
        answer = await _sent(connection, operation, endpoint, Dialect.JSON, body)
    except APIStatusError:
        raise refusal from None  # refused both ways: the first answer is the honest one
    connection.dialect = Dialect.JSON
    return answer


async def _sent(
    connection: Connection, operation: Operation, endpoint: Endpoint, dialect: Dialect, body: Body
) -> Answer:
    if dialect is Dialect.PROTO and endpoint is endpoints.FORWARD:
        endpoint = endpoints.FORWARD_BACKWARD  # the newer dialect says "forward only" inside the body
    return await call(connection, endpoint, body, operation=operation)


async def _encoded(
    connection: Connection, encode: Callable[[int, Dialect], Body], seq_id: int, dialect: Dialect, size_hint: int
) -> Body:
    def make() -> Body:
        body = encode(seq_id, dialect)
        if connection.server.proto_compress_fwdbwd and body.content_type == PROTOBUF:
            body = compress(body)
        return body

    if size_hint <= INLINE_BYTES:
        return make()
    return await asyncio.get_running_loop().run_in_executor(None, make)
