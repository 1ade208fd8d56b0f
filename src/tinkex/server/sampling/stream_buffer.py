"""What a stream has drawn and its client has not read yet: bounded by its bytes, and merged when much of it waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tinkex.engine.contract import Sampled, SampleEvent, Tokens

EVENT_BYTES = 400
TOKEN_BYTES = 80
"""What an event, and each of its tokens with its log-probability, take in memory."""
MOST_WAITING = 64
"""Up to so many events wait as they were drawn: a reader that is late for a moment gets every token by itself."""

MOST_MERGED = 10_000
"""Tokens of one event: 300 kB, of which a client decodes a megabyte at most."""


class StreamBuffer:
    """The events of one sample, in order for each sequence.

    Where more than `MOST_WAITING` events wait, the tokens of a sequence are merged into its last one. So a reader that
    is slower than the engine gets fewer and larger events, and catches up; only one that does not read at all reaches
    the limit.
    """

    def __init__(self, max_bytes: int, on_overflow: Callable[[], Exception]) -> None:
        """`on_overflow` ends the sample and returns the error for the reader."""
        self._max_bytes, self._on_overflow = max_bytes, on_overflow
        self._waiting: deque[Tokens] = deque()
        self._last_of: dict[int, Tokens] = {}
        """Sequence → its newest event of those that wait."""
        self._last: Sampled | Exception | None = None
        self._has_events = asyncio.Event()
        self._unread_bytes = 0

    def put(self, event: SampleEvent | Exception) -> None:
        if self._last is not None:
            return
        if not isinstance(event, Tokens):
            self._last = event
        elif (waiting := self._mergeable(event)) is not None:
            waiting.tokens.extend(event.tokens)
            waiting.logprobs.extend(event.logprobs)
            self._unread_bytes += TOKEN_BYTES * len(event.tokens)
        else:
            self._waiting.append(event)
            self._last_of[event.index] = event
            self._unread_bytes += EVENT_BYTES + TOKEN_BYTES * len(event.tokens)
        if self._unread_bytes > self._max_bytes and self._last is None:
            self._waiting.clear()
            self._last_of.clear()
            self._unread_bytes = 0
            self._last = self._on_overflow()
        self._has_events.set()

    def _mergeable(self, event: Tokens) -> Tokens | None:
        """Return the event that these tokens are added to, if there is one."""
        waiting = self._last_of.get(event.index) if len(self._waiting) >= MOST_WAITING else None
        return waiting if waiting is not None and len(waiting.tokens) < MOST_MERGED else None

    async def get(self) -> SampleEvent:
        """Return the next event, or raise the error that ended the sample."""
        await self._has_events.wait()
        if self._waiting:
            event = self._waiting.popleft()
            if self._last_of.get(event.index) is event:
                del self._last_of[event.index]
            self._unread_bytes -= EVENT_BYTES + TOKEN_BYTES * len(event.tokens)
            if not self._waiting and self._last is None:
                self._has_events.clear()
            return event
        assert self._last is not None
        if isinstance(self._last, Exception):
            raise self._last
        return self._last
