"""Long polls: whoever asks for a result that is not there yet waits here, and is woken by it. Nobody polls the store.

Clients give a poll up after 45 s and ask again, and several may ask for one id: any number of waiters per request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

CLOSING_HOLD_S = 0.3
RECENT_BYTES = 64 << 20
"""Results kept in memory beside the store, so that the usual poll right after the work reads no disk."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation ended: bytes to be sent, or an error."""

    tenant: str
    content: bytes = b""
    content_type: Literal["json", "proto"] = "json"
    error: str | None = None
    category: str = "server"


class Waiters:
    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._recent: OrderedDict[str, Outcome] = OrderedDict()
        self._bytes = 0
        self._is_closing = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def recent(self, request_id: str) -> Outcome | None:
        return self._recent.get(request_id)

    def settle(self, request_id: str, outcome: Outcome) -> None:
        """The result is in the store; wake whoever waits for it."""
        self._recent[request_id] = outcome
        self._bytes += len(outcome.content)
        while self._bytes > RECENT_BYTES and len(self._recent) > 1:
            self._bytes -= len(self._recent.popitem(last=False)[1].content)
        while len(self._recent) > 10_000:
            self._bytes -= len(self._recent.popitem(last=False)[1].content)
        for waiter in self._waiting.pop(request_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, request_id: str, seconds: float) -> Outcome | None:
        """The outcome, or None when the time is up."""
        seconds = self.hold_s(seconds)
        if (outcome := self._recent.get(request_id)) is not None:
            return outcome
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
        """How long a poll may be held: hardly at all once the service ends, or it could not."""
        return min(seconds, CLOSING_HOLD_S) if self._is_closing else seconds

    def wake_all(self) -> None:
        """The service ends: polls are answered with what is known now."""
        self._is_closing = True
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
