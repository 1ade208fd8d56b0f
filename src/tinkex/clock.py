"""The only reader of time. Code that waits takes a `Clock`, so that tests can pass one that they advance by hand."""

from __future__ import annotations

import time


class Clock:
    """Real time."""

    def now(self) -> float:
        """Monotonic seconds: for durations and deadlines."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970: for dates that others will read."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        import asyncio  # not at the top: the command line reads the time without it, and asyncio takes 40 ms to load

        await asyncio.sleep(seconds)

    def pause(self, seconds: float) -> None:
        """Block the calling thread. Ctrl-C ends the pause on the main thread."""
        time.sleep(seconds)


def thread_cpu_s() -> float:
    """Return how long the calling thread has computed. It does not grow while the machine runs other programs."""
    return time.thread_time()


REAL = Clock()
