"""The only reader of time. Code that waits takes a `Clock`, so that tests can pass one that they advance by hand."""

from __future__ import annotations

import asyncio
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
        await asyncio.sleep(seconds)


REAL = Clock()
