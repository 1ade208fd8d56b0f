"""A clock that tests turn by hand."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tinkex.testing import FakeClock


def test_time_stands_still_until_it_is_advanced() -> None:
    clock = FakeClock(start=5.0, wall=100.0)
    assert (clock.now(), clock.wall()) == (5.0, 100.0)
    clock.advance(2.5)
    assert (clock.now(), clock.wall()) == (7.5, 102.5)


def test_sleepers_wake_in_order_when_their_time_has_come() -> None:
    clock, woken = FakeClock(), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async def main() -> None:
        tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (3.0, 1.0, 2.0)]
        await asyncio.sleep(0)
        assert clock.sleepers == 3
        clock.advance(2.0)
        await asyncio.gather(tasks[1], tasks[2])
        assert woken == [1.0, 2.0] and clock.sleepers == 1
        clock.advance(1.0)
        await tasks[0]

    asyncio.run(main())
    assert woken == [1.0, 2.0, 3.0] and sorted(clock.slept) == [1.0, 2.0, 3.0]


def test_a_sleeper_on_another_thread_is_woken() -> None:
    clock = FakeClock()
    thread = threading.Thread(target=lambda: asyncio.run(clock.sleep(3600)))
    thread.start()
    clock.wait_for_sleepers(1)
    clock.advance(3600)
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_waiting_for_sleepers_that_never_come_ends() -> None:
    with pytest.raises(TimeoutError, match="0 asleep"):
        FakeClock().wait_for_sleepers(1, timeout_s=0.01)


def test_a_cancelled_sleep_leaves_nothing_behind() -> None:
    clock = FakeClock()

    async def main() -> None:
        task = asyncio.create_task(clock.sleep(10))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert clock.sleepers == 0


def test_an_automatic_clock_sleeps_in_no_time() -> None:
    clock = FakeClock(start=0.0, auto=True)

    async def main() -> None:
        await clock.sleep(3600)
        await clock.sleep(1)

    asyncio.run(main())
    assert clock.now() == 3601 and clock.slept == [3600, 1]


def test_a_paused_thread_continues_when_its_time_has_come() -> None:
    clock = FakeClock()
    thread = threading.Thread(target=clock.pause, args=(3.0,))
    thread.start()
    while not clock.slept:  # the pause begins
        pass
    with clock._changed:  # and holds the lock no more: it waits
        pass
    clock.advance(2.0)
    thread.join(0.05)
    assert thread.is_alive()
    clock.advance(1.0)
    thread.join(5)
    assert not thread.is_alive()


def test_an_automatic_clock_pauses_no_time() -> None:
    clock = FakeClock(start=5.0, auto=True)
    clock.pause(3.0)
    assert (clock.now(), clock.slept) == (8.0, [3.0])
