"""Long polls are woken by the result, end in time, and do not delay a shutdown."""

from __future__ import annotations

import asyncio

from tinkex.server.training.waiters import OperationResult, Waiters


def test_every_waiter_of_a_request_is_woken_by_its_result() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        polls = [asyncio.create_task(waiters.wait("a", 10)) for _ in range(3)]
        other = asyncio.create_task(waiters.wait("b", 0.05))
        await asyncio.sleep(0)
        waiters.settle("a", OperationResult(tenant="t", content=b"{}"))
        assert [outcome and outcome.content for outcome in await asyncio.gather(*polls)] == [b"{}"] * 3
        assert await other is None
        assert len(waiters) == 0

    asyncio.run(scenario())


def test_shutdown_releases_polls_and_holds_no_new_ones() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        poll = asyncio.create_task(waiters.wait("a", 60))
        await asyncio.sleep(0)
        waiters.wake_all()
        assert await asyncio.wait_for(poll, 1) is None
        assert await asyncio.wait_for(waiters.wait("a", 60), 10) is None

    asyncio.run(scenario())
