"""A clock that a test advances by hand, so that code that waits an hour is tested in no time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading

from tinkex.clock import Clock


class FakeClock(Clock):
    """Stands still until `advance`. Sleepers may be on any loop and any thread.

        clock = FakeClock()
        ...                           # code under test calls `await clock.sleep(30)` on its own thread
        clock.wait_for_sleepers(1)    # it has come so far
        clock.advance(30)             # and goes on

    With `auto=True` every sleep ends at once and turns the hands itself; `slept` lists how long each would have taken.
    """

    def __init__(self, start: float = 1_000.0, wall: float = 1_767_225_600.0, auto: bool = False) -> None:
        self.slept: list[float] = []
        self._now = start
        self._wall_offset = wall - start
        self._auto = auto
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._changed = threading.Condition()

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if self._auto or seconds <= 0:
            with self._changed:
                self._now += max(seconds, 0.0)
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        alarm: asyncio.Future[None] = loop.create_future()
        with self._changed:
            entry = (self._now + seconds, next(self._order), loop, alarm)
            heapq.heappush(self._sleepers, entry)
            self._changed.notify_all()
        try:
            await alarm
        finally:
            with self._changed:
                if entry in self._sleepers:  # cancelled before its time
                    self._sleepers.remove(entry)
                    heapq.heapify(self._sleepers)

    def pause(self, seconds: float) -> None:
        """Block the calling thread until `advance` has passed the time; with `auto=True`, turn the hands at once."""
        self.slept.append(seconds)
        with self._changed:
            end = self._now + max(seconds, 0.0)
            if self._auto:
                self._now = end
            self._changed.wait_for(lambda: self._now >= end)

    @property
    def sleepers(self) -> int:
        """How many are asleep now."""
        return len(self._sleepers)

    def advance(self, seconds: float) -> None:
        """Turn the hands, waking whoever is due, earliest first. Sleeps begun by the woken count from the new time."""
        with self._changed:
            self._now += seconds
            while self._sleepers and self._sleepers[0][0] <= self._now:
                _, _, loop, alarm = heapq.heappop(self._sleepers)
                loop.call_soon_threadsafe(_ring, alarm)
            self._changed.notify_all()

    def wait_for_sleepers(self, count: int = 1, timeout_s: float = 5.0) -> None:
        """Block until at least so many are asleep. Not for use on the loop they sleep on."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._sleepers) >= count, timeout_s):
                raise TimeoutError(f"{len(self._sleepers)} asleep after {timeout_s} s, expected {count}")


def _ring(alarm: asyncio.Future[None]) -> None:
    if not alarm.done():
        alarm.set_result(None)
