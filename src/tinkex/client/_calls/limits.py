"""Limits what is in flight at once: a count, a byte budget, and a back-off that all samplers of one service share.

First come, first served; each waiter costs O(1), whatever the number of waiters (the official client wakes all of them
for every release, which grows quadratically). Loop thread only, so no locks.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tinkex.client._runtime.fork import ProcessRegistry
from tinkex.clock import REAL, Clock

DISPATCHES = 400
DISPATCHES_WHILE_BACKED_OFF = 10
BACKED_OFF_S = 10.0
BYTES_PENALTY = 20
"""While backed off a byte counts this many times, as in the official client."""


class Gate:
    """Admits up to `count` entries and `limit_bytes` bytes; a single entry is always admitted, however large."""

    def __init__(self, clock: Clock, count: int, limit_bytes: int | None = None) -> None:
        self._clock = clock
        self.count = count
        self.limit_bytes = limit_bytes
        self.admitted = 0
        self.admitted_bytes = 0
        self._closed_until = 0.0
        self._slow_until = 0.0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0

    async def acquire(self, size_bytes: int = 0) -> None:
        """Wait to be admitted. Each acquire needs a release with the same size."""
        if not self._waiters and self._fits(size_bytes):
            self._take(size_bytes)
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((size_bytes, waiter))
        self._admit()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(size_bytes)  # admitted and cancelled in the same tick: admit the next
            else:
                self._admit()  # it may have been the large one that held up the small ones behind it
            raise

    def release(self, size_bytes: int = 0) -> None:
        self.admitted -= 1
        self.admitted_bytes -= size_bytes
        self._admit()

    def back_off(self, seconds: float) -> None:
        """Admit none for a while, then few at a time: the service said it has too much."""
        now = self._clock.now()
        self._closed_until = max(self._closed_until, now + seconds)
        self._slow_until = max(self._slow_until, self._closed_until + BACKED_OFF_S)
        self._admit()

    @property
    def waiting(self) -> int:
        return sum(not waiter.done() for _, waiter in self._waiters)

    def _fits(self, size_bytes: int) -> bool:
        # Two comparisons on the common path; time is read only after a back-off.
        if self._slow_until:
            now = self._clock.now()
            if now < self._closed_until:
                return False
            if now < self._slow_until:
                if self.admitted >= min(self.count, DISPATCHES_WHILE_BACKED_OFF):
                    return False
                size_bytes *= BYTES_PENALTY
            else:
                self._slow_until = self._closed_until = 0.0
        if self.admitted == 0:
            return True
        if self.admitted >= self.count:
            return False
        return self.limit_bytes is None or self.admitted_bytes + size_bytes <= self.limit_bytes

    def _take(self, size_bytes: int) -> None:
        self.admitted += 1
        self.admitted_bytes += size_bytes

    def _admit(self) -> None:
        waiters = self._waiters
        while waiters:
            size_bytes, waiter = waiters[0]
            if waiter.done():
                waiters.popleft()
                continue
            if not self._fits(size_bytes):
                break
            waiters.popleft()
            self._take(size_bytes)
            waiter.set_result(None)
        if waiters and self._slow_until:
            now = self._clock.now()
            self._wake_at(self._closed_until if now < self._closed_until else self._slow_until, now)

    def _wake_at(self, wake_at: float, now: float) -> None:
        """Admit again at that time. A second back-off may close a gate that was only slow: then sooner than was set."""
        if self._timer is not None:
            if self._wakes_at <= wake_at:
                return
            self._timer.cancel()
        self._wakes_at = wake_at
        self._timer = asyncio.get_running_loop().call_later(max(wake_at - now, 0.001), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._admit()


class Limiter:
    """The gates of one service and key: all clients that use them see the same back-off at once."""

    def __init__(self, clock: Clock = REAL) -> None:
        self.dispatch = Gate(clock, DISPATCHES, 10 << 20)
        """Samples being submitted right now."""
        self.samples = Gate(clock, 2000)
        """Samples submitted and not yet answered."""
        self.results = Gate(clock, 1 << 30, 50 << 20)
        """Bytes of large results being fetched."""


_limiters: ProcessRegistry[tuple[str, str], Limiter] = ProcessRegistry()


def limiter_for(base_url: str, key: str) -> Limiter:
    """Return the limiter of a service and key: the only way to obtain one. Both come from a resolved `Config`."""
    return _limiters.get((base_url, key), Limiter)
