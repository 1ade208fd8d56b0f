"""The watchdog of the event loop: what it counts, and what it logs."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from tinkex.clock import REAL
from tinkex.server.upkeep.watchdog import Watchdog

pytestmark = pytest.mark.timing


def watched(block_s: float, times: int = 1) -> tuple[list[float], Watchdog]:
    stalls: list[float] = []

    async def work() -> Watchdog:
        watchdog = Watchdog(REAL, stalls.append, stall_s=0.1)
        watchdog.start()
        for _ in range(times):
            await asyncio.sleep(0.03)
            time.sleep(block_s)  # noqa: ASYNC251  # blocking is what is tested
        await asyncio.sleep(0.05)
        watchdog.stop()
        return watchdog

    return stalls, asyncio.run(work())


def test_a_blocked_loop_is_counted_and_its_line_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tinkex.server"):
        stalls, watchdog = watched(0.3, times=2)
    assert len(stalls) == 2
    assert 0.25 < watchdog.longest_s < 1.0
    [message] = {record.getMessage() for record in caplog.records}
    assert "test_watchdog.py" in message
    assert len(caplog.records) == 1


def test_a_loop_that_moves_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    stalls, watchdog = watched(0.001, times=20)
    assert stalls == [] and watchdog.longest_s == 0.0
    assert not caplog.records
