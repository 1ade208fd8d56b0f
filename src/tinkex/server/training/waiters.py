"""Long polls that wait for a result: each is woken when its operation has finished. No poll reads the store in a loop.

Clients give up a poll after 45 s and send another, and several may poll one id: any number of waiters per request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tinkex.store.records import CheckpointRecord, SamplerRecord

CLOSING_HOLD_S = 0.3
RECENT_BYTES = 64 << 20
"""Results kept in memory beside the store, so that the usual poll right after the work reads no disk."""
MOST_RECENT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """How an operation ended: the bytes to send to its client, or an error; and what the store writes with it."""

    tenant: str
    content: bytes = b""
    content_type: Literal["json", "proto"] = "json"
    error: str | None = None
    category: str = "server"
    checkpoint: CheckpointRecord | None = None
    sampler: SamplerRecord | None = None
    engine_s: float = 0.0
    """How long it was in the engine."""
    own_s: float | None = None
    """The part of that time that it used alone; unknown for short commands."""
    metrics: dict[str, float] | None = None
    """Numbers that the journal keeps after the result has expired."""


class Waiters:
    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._recent: OrderedDict[str, OperationResult] = OrderedDict()
        self._bytes = 0
        self._is_closing = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def recent(self, request_id: str) -> OperationResult | None:
        return self._recent.get(request_id)

    def settle(self, request_id: str, result: OperationResult) -> None:
        """Wake the polls of an operation whose result is in the store."""
        self._recent[request_id] = result
        self._bytes += len(result.content)
        while len(self._recent) > 1 and (self._bytes > RECENT_BYTES or len(self._recent) > MOST_RECENT):
            self._bytes -= len(self._recent.popitem(last=False)[1].content)
        wake(self._waiting.pop(request_id, set()))

    def let_go(self, request_ids: Iterable[str]) -> None:
        """Let the polls of these operations respond now: another server has them, and the client asks again."""
        for request_id in request_ids:
            wake(self._waiting.pop(request_id, set()))

    async def wait(self, request_id: str, seconds: float) -> OperationResult | None:
        """Return how the operation ended, or None when the time is up."""
        if request_id not in self._recent:
            waiters = self._waiting.setdefault(request_id, set())
            try:
                await wait_in(waiters, self.hold_s(seconds))
            finally:
                if not waiters and self._waiting.get(request_id) is waiters:
                    del self._waiting[request_id]
        return self._recent.get(request_id)

    def hold_s(self, seconds: float) -> float:
        """Return how long to hold a poll: near zero during shutdown, so that polls do not delay it."""
        return min(seconds, CLOSING_HOLD_S) if self._is_closing else seconds

    def wake_all(self) -> None:
        """Let all polls respond with what is known now, because the service is shutting down."""
        self._is_closing = True
        for waiters in self._waiting.values():
            wake(waiters)


def wake(waiters: set[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


async def wait_in(waiters: set[asyncio.Future[None]], seconds: float) -> None:
    """Wait until `wake(waiters)` or until the time is up."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.add(waiter)
    try:
        await asyncio.wait([waiter], timeout=seconds)
    finally:
        waiters.discard(waiter)
