"""`Exchange`: one request and its response, whatever the version of HTTP. Connections fill it, callers wait for it."""

from __future__ import annotations

import abc
import asyncio
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from tinkex.errors import ValidationError
from tinkex.wire.body import MAX_BYTES

STREAM_BUFFER = 1 << 20
"""Bytes buffered for a slow reader of a stream; beyond that the socket waits, and with it the service."""
HEAD_BYTES = 1 << 18
"""Of a response's headers, or of anything else in it that is no body. Servers themselves allow 8 to 64 KiB."""
MAX_HEADERS = 256
ERROR_BYTES = 1 << 24
"""Of the body of an error: larger than any page of a proxy."""
PIECE_BYTES = 64
"""What a piece of a body costs beside its bytes: a body in pieces of two bytes takes twenty times its size."""


_BAD_HEADER = re.compile(r"[^\t\x20-\xff]")
_BAD_TARGET = re.compile(r"[^\x21-\xff]")


class HTTPRequest(NamedTuple):
    """A request to send. `target` is the path with its query, as it stands in a URL."""

    method: str
    scheme: str
    authority: str
    target: str
    headers: Mapping[str, str]
    content: bytes

    def check(self) -> None:
        """Reject what no version of HTTP can carry, before any of it is written."""
        for name, value in self.headers.items():
            if _BAD_HEADER.search(value) or _BAD_HEADER.search(name):
                raise ValidationError(f"The header {name!r} holds a line break or a character that headers cannot.")
        if _BAD_TARGET.search(self.target):
            raise ValidationError("The address holds a character that must be written as %XX there.")


class ConnectionLost(Exception):
    """The connection ended before the response did. `is_untouched`: the service cannot have acted on the request."""

    def __init__(self, reason: str, *, is_untouched: bool = False) -> None:
        super().__init__(reason)
        self.is_untouched = is_untouched


class ReadTimeout(Exception):
    """For too long, no byte came and none went."""


class ResponseTooLarge(Exception):
    """The response is larger than this client takes. Its connection is closed: asking again would not help."""


class Exchange:
    """Filled by a connection, in order: `begin`, `feed` …, `end`; with an error it may `end` at any time."""

    __slots__ = (
        "_is_ended", "_news", "_pieces", "_resume", "abandon", "begun", "buffered", "ended", "error", "headers",
        "is_streamed", "last_activity", "limit_bytes", "release", "status", "timer",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, is_streamed: bool, limit_bytes: int = MAX_BYTES) -> None:
        self.is_streamed = is_streamed
        self.limit_bytes = limit_bytes
        """Of the body, unless its reader takes it piece by piece."""
        self.ended: asyncio.Future[None] = loop.create_future()
        self.begun: asyncio.Future[None] | None = loop.create_future() if is_streamed else None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.error: Exception | None = None
        self.buffered = 0
        self.last_activity = loop.time()
        """When a byte of this exchange last came or went. Other exchanges on the same connection do not count."""
        self.release: Callable[[], None] = _nothing
        """Gives the connection back to the pool: called once, when the exchange has ended."""
        self.timer: asyncio.TimerHandle | None = None
        """The pool's check whether anything still moves, while a caller waits for the response (or its headers)."""
        self.abandon: Callable[[], None] = _nothing
        """Ends the exchange if it has not ended: its reader has gone."""
        self._pieces: deque[bytes] = deque()
        self._news: asyncio.Event | None = asyncio.Event() if is_streamed else None
        self._resume: Callable[[], None] = _nothing
        self._is_ended = False

    @property
    def has_begun(self) -> bool:
        return self.status != 0

    def begin(self, status: int, headers: dict[str, str], resume: Callable[[], None]) -> None:
        """Take status and headers. Raises ResponseTooLarge if the body that they announce is."""
        if not self.is_streamed:
            if status >= 400:
                self.limit_bytes = min(self.limit_bytes, ERROR_BYTES)
            length = headers.get("content-length", "")
            if len(length) > 6 and length.isdecimal() and (len(length) > 15 or int(length) > self.limit_bytes):
                raise self._too_large(f"{length[:20]} bytes")
        self.status, self.headers, self._resume = status, headers, resume
        if self.begun is not None and not self.begun.done():
            self.begun.set_result(None)

    def feed(self, data: bytes) -> bool:
        """Take a piece of the body; False asks the connection to read no further until `resume` is called.

        Raises ResponseTooLarge where the whole body is to be taken and is more than the limit.
        """
        if self._news is None:
            self.buffered += len(data) + PIECE_BYTES
            if self.buffered > self.limit_bytes:
                raise self._too_large("a body that goes on")
            self._pieces.append(data)
            return True
        self._pieces.append(data)
        self.buffered += len(data)
        self._news.set()
        return self.buffered < STREAM_BUFFER

    def end(self, error: Exception | None = None) -> None:
        """The response is complete, or broke off with an error. Only the first call counts."""
        if self._is_ended:
            return
        self._is_ended, self.error = True, error
        for waiter in (self.begun, self.ended):
            if waiter is not None and not waiter.done():
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
                    waiter.exception()  # marked as seen: no waiter may be left
        if self._news is not None:
            self._news.set()
        self.release()

    def _too_large(self, what: str) -> ResponseTooLarge:
        self._pieces.clear()
        return ResponseTooLarge(f"it has {what}, and the limit is {self.limit_bytes:,} bytes")

    def content(self) -> bytes:
        """The whole body, once ended."""
        if len(self._pieces) != 1:
            whole = b"".join(self._pieces)
            self._pieces.clear()  # or a large body would be in memory twice
            self._pieces.append(whole)
        return self._pieces[0]

    async def next_piece(self) -> bytes:
        """Take the next piece of the body as it arrives; b"" at its end."""
        await self.wait_for_piece()
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        self.buffered -= len(piece)
        if self.buffered < STREAM_BUFFER // 2:
            self._resume()
        return piece

    async def wait_for_piece(self) -> None:
        """Return when a piece of the body is here or the body has ended; raise what broke it off."""
        assert self._news is not None
        while not self._pieces:
            if self._is_ended:
                if self.error is not None:
                    raise self.error
                return
            self._news.clear()
            await self._news.wait()


class Connection(asyncio.Protocol, abc.ABC):
    """A connection of either version, as the pool uses it. Loop thread."""

    capacity = 1
    settled: asyncio.Future[None] | None = None
    """Done when the service has said how many exchanges it takes; None where that is not a question."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.in_use = 0
        self.is_closed = False
        self.was_used = False
        self.last_activity = self.idle_since = loop.time()

    @abc.abstractmethod
    def start(self, request: HTTPRequest, exchange: Exchange) -> None: ...

    @abc.abstractmethod
    def abandon(self, exchange: Exchange) -> None:
        """Stop an exchange that no caller waits for any more."""

    def unsent_bytes(self, exchange: Exchange) -> int:
        return 0 if self.is_closed else self._transport.get_write_buffer_size()

    def close(self) -> None:
        self.is_closed = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)


def _nothing() -> None:
    return None
