"""A clock that a test advances by hand, so that code that waits an hour is tested in no time."""

from __future__ import annotations

import asyncio
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
        self._sleepers: dict[asyncio.Future[None], float] = {}  # each with the time when it shall wake
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
        alarm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._sleepers[alarm] = self._now + seconds
            self._changed.notify_all()
        try:
            await alarm
        finally:
            with self._changed:
                self._sleepers.pop(alarm, None)  # if it was cancelled before its time

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
            for alarm in sorted(self._sleepers, key=self._sleepers.__getitem__):
                if self._sleepers[alarm] <= self._now:
                    del self._sleepers[alarm]
                    alarm.get_loop().call_soon_threadsafe(_ring, alarm)
            self._changed.notify_all()

    def wait_for_sleepers(self, count: int = 1, timeout_s: float = 5.0) -> None:
        """Block until at least so many are asleep. Not for use on the loop they sleep on."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._sleepers) >= count, timeout_s):
                raise TimeoutError(f"{len(self._sleepers)} asleep after {timeout_s} s, expected {count}")


def _ring(alarm: asyncio.Future[None]) -> None:
    if not alarm.done():
        alarm.set_result(None)
