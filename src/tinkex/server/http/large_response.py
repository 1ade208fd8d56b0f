"""Sends a large response in pieces: written at once it would be copied several times while nobody else is served.

`protocol` closes the connection of a client that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tinkex.server.limits.tenant_turns import TenantTurns
from tinkex.wire.json_pieces import joined

PIECE_BYTES: Final = 64 << 10


class LargeResponse(Response):
    """A response that is sent in pieces. `on_end` is called when it was sent, or its client has left."""

    on_end: Callable[[], None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, in_pieces(send))
        finally:
            if self.on_end is not None:
                self.on_end()


class WrittenResponse(StreamingResponse):
    """A response whose pieces are written while it is sent, see `written`. `on_end` as above."""

    on_end: Callable[[], None] | None = None

    def __init__(self, pieces: Iterator[bytes], turns: TenantTurns, tenant: str, media_type: str) -> None:
        super().__init__(written(pieces, turns, tenant), media_type=media_type)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope.get("http_version") == "1.0":  # it knows no body without a length
                whole = Response(await asyncio.to_thread(b"".join, self._pieces), media_type=self.media_type)
                await whole(scope, receive, in_pieces(send))
            else:
                await super().__call__(scope, receive, send)
        finally:
            if self.on_end is not None:
                self.on_end()


async def written(pieces: Iterator[bytes], turns: TenantTurns, tenant: str) -> AsyncIterator[bytes]:
    """Yield the pieces in blocks: one block of all responses together, and then a round of the loop for all else.

    However many large results are polled, each request waits for one block at most, and each tenant for one block of
    every other.
    """
    blocks = joined(pieces, PIECE_BYTES)
    while True:
        async with turns.of(tenant):
            block = next(blocks, None)
            await asyncio.sleep(0)
        if block is None:
            return
        yield block


def in_pieces(send: Send) -> Send:
    """Return a `send` that cuts bodies, and lets other requests go on between the pieces."""

    async def send_pieces(message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await send(message)
            return
        for at in range(0, len(body), PIECE_BYTES):
            has_more = message.get("more_body", False) or at + PIECE_BYTES < len(body)
            await send({**message, "body": body[at : at + PIECE_BYTES], "more_body": has_more})
            await asyncio.sleep(0)  # a client that reads at once never makes `send` wait

    return send_pieces
