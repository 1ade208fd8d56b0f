"""Long polls that wait for a result: each is woken when its operation has finished. No poll reads the store in a loop.

Clients give up a poll after 45 s and send another, and several may poll one id: any number of waiters per request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

CLOSING_HOLD_S = 0.3
RECENT_BYTES = 64 << 20
"""Results kept in memory beside the store, so that the usual poll right after the work reads no disk."""
MOST_RECENT = 10_000


@dataclass(frozen=True, slots=True)
class FinishedOperation:
    """How an operation ended: the bytes to send to its client, or an error."""

    tenant: str
    content: bytes = b""
    content_type: Literal["json", "proto"] = "json"
    error: str | None = None
    category: str = "server"


class Waiters:
    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._recent: OrderedDict[str, FinishedOperation] = OrderedDict()
        self._bytes = 0
        self._is_closing = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def recent(self, request_id: str) -> FinishedOperation | None:
        return self._recent.get(request_id)

    def settle(self, request_id: str, finished: FinishedOperation) -> None:
        """Wake the polls of an operation whose result is in the store."""
        self._recent[request_id] = finished
        self._bytes += len(finished.content)
        while len(self._recent) > 1 and (self._bytes > RECENT_BYTES or len(self._recent) > MOST_RECENT):
            self._bytes -= len(self._recent.popitem(last=False)[1].content)
        for waiter in self._waiting.pop(request_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, request_id: str, seconds: float) -> FinishedOperation | None:
        """Return how the operation ended, or None when the time is up."""
        seconds = self.hold_s(seconds)
        if (finished := self._recent.get(request_id)) is not None:
            return finished
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, set()).add(waiter)
        try:
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            waiters = self._waiting.get(request_id)
            if waiters is not None:
                waiters.discard(waiter)
                if not waiters:
                    del self._waiting[request_id]
        return self._recent.get(request_id)

    def hold_s(self, seconds: float) -> float:
        """Return how long to hold a poll: near zero during shutdown, so that polls do not delay it."""
        return min(seconds, CLOSING_HOLD_S) if self._is_closing else seconds

    def wake_all(self) -> None:
        """Let all polls respond with what is known now, because the service is shutting down."""
        self._is_closing = True
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
