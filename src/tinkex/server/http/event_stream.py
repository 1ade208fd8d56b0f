"""Sends server-sent events: with an HTTP status for an early error, and with comments while nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tinkex.server.http.large_response import in_pieces
from tinkex.wire import sse

FIRST_EVENT_S: Final = 0.5
"""How long to wait for the first event before the headers are sent. An error after that cannot set the status."""
KEEP_ALIVE_S: Final = 15.0
"""After so long without an event a comment is sent, so that proxies do not close the connection."""


Event = bytes | AsyncIterator[bytes]
"""An encoded event, or the blocks of a large one."""


async def open_event_stream(
    events: AsyncGenerator[Event, None], encode_error: Callable[[Exception], bytes]
) -> StreamingResponse:
    """Wait briefly for the first event, then return the response that sends all of them.

    `events` yields encoded events. An exception that it raises before the first event is raised here and becomes an
    HTTP status; a later one is encoded by `encode_error` and sent as the last event.
    """
    first = asyncio.ensure_future(anext(events))
    response = _EventStream(events, first, encode_error)
    try:
        await asyncio.wait([first], timeout=FIRST_EVENT_S)
        if first.done() and (error := first.exception()) is not None and not isinstance(error, StopAsyncIteration):
            raise error
    except BaseException:
        await response.close()
        raise
    return response


class _EventStream(StreamingResponse):
    """Closes the generator of events when the response ends, even if the client left before its first byte."""

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        first: asyncio.Future[Event],
        encode_error: Callable[[Exception], bytes],
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(self._send_all(), headers=headers, media_type="text/event-stream")
        self._events, self._next, self._encode_error = events, first, encode_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, in_pieces(send))
        finally:
            await self.close()

    async def _send_all(self) -> AsyncIterator[bytes]:
        is_whole = True
        try:
            while True:
                # `wait` and not `wait_for`, which would cancel the generator when the time is up.
                while not (await asyncio.wait([self._next], timeout=KEEP_ALIVE_S))[0]:
                    yield sse.comment("keep-alive")
                event = self._next.result()
                if isinstance(event, bytes):
                    yield event
                else:
                    is_whole = False
                    async for block in event:  # nothing may come between them
                        yield block
                    is_whole = True
                self._next = asyncio.ensure_future(anext(self._events))
        except StopAsyncIteration:
            return
        except Exception as error:  # an edge: the status is sent already
            if not is_whole:
                raise  # the connection ends: words inside of an event would be taken for a part of it
            yield self._encode_error(error)

    async def close(self) -> None:
        if not self._next.done():
            self._next.cancel()
            await asyncio.wait([self._next])  # a generator that is running cannot be closed
        if not self._next.cancelled():
            self._next.exception()  # read it, or asyncio logs it as never retrieved
        await self._events.aclose()
