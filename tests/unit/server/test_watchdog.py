"""The watchdog of the event loop: what it counts, and what it logs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest

from tinkex.clock import REAL
from tinkex.server.upkeep.watchdog import Watchdog

pytestmark = pytest.mark.timing


def watched(block: Callable[[], object], times: int = 1) -> list[tuple[str, float]]:
    stalls: list[tuple[str, float]] = []

    async def work() -> None:
        watchdog = Watchdog(REAL, lambda cause, seconds: stalls.append((cause, seconds)), stall_s=0.1)
        watchdog.start()
        for _ in range(times):
            await asyncio.sleep(0.03)
            block()
        await asyncio.sleep(0.05)
        watchdog.stop()

    asyncio.run(work())
    return stalls


def compute(cpu_s: float) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def test_a_blocked_loop_is_counted_and_its_line_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tinkex.server"):
        stalls = watched(lambda: time.sleep(0.3), times=2)
    assert len(stalls) == 2
    assert 0.25 < max(seconds for _, seconds in stalls) < 1.0
    [message] = {record.getMessage() for record in caplog.records}
    assert "test_watchdog.py" in message
    assert len(caplog.records) == 1


def test_a_loop_that_moves_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert watched(lambda: time.sleep(0.001), times=20) == []
    assert not caplog.records


def test_code_that_computes_on_the_loop_is_told_from_a_loop_that_gets_no_core() -> None:
    assert {cause for cause, _ in watched(lambda: compute(0.3))} == {"code"}
    assert {cause for cause, _ in watched(lambda: time.sleep(0.3))} == {"waiting"}
