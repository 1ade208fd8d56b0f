"""What a worker gives back when a run turns out to be at home on another server."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import insert, update

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_worker import new_run, running, step
from tinkex.store.records import Home
from tinkex.store.tables import homes

HERE = Home(run_id="s:train:0", node="a", epoch=1)


class OneHome:
    """Believes that the run is at home here until a write is refused."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()

    async def own(self, run_id: str) -> Home:
        assert run_id == HERE.run_id
        return HERE

    def lose(self, home: Home) -> None:
        assert home == HERE
        self.lost.set()


def test_a_save_whose_run_is_elsewhere_gives_its_quota_back(tmp_path: Path) -> None:
    """Or the tenant would have less and less of it on this server, until it is restarted."""

    async def run() -> None:
        async with running(tmp_path, FakeEngine(), quota_gb=1.0) as service:
            owner = service.worker.homes = OneHome()
            with service.store._write() as connection:
                connection.execute(insert(homes).values(run_id=HERE.run_id, node=HERE.node, epoch=HERE.epoch))
            queue = await new_run(service)
            request_id = await service.intake.submit(queue, 1, "save_weights", b"", options={"name": "x"})
            assert service.quotas._reserved
            with service.store._write() as connection:
                connection.execute(update(homes).values(node="b", epoch=2))
            await asyncio.wait_for(owner.lost.wait(), 5)
            await service.worker.forget(HERE.run_id)
            assert service.quotas._reserved == {}
            operation = service.store.get_operation(request_id)
            assert operation is not None and operation.state == "queued", "the new home runs it"

    asyncio.run(run())


def test_a_run_that_leaves_starts_no_other_operation(tmp_path: Path) -> None:
    """Before: the eviction woke the loop, which started one more, and a drain advanced the run by one at a time."""

    async def run() -> None:
        engine = FakeEngine()
        async with running(tmp_path, engine) as service:
            service.worker.homes = OneHome()
            with service.store._write() as connection:
                connection.execute(insert(homes).values(run_id=HERE.run_id, node=HERE.node, epoch=HERE.epoch))
            queue = await new_run(service)
            engine.gate.clear()
            for number in range(1, 4):
                await step(service, queue, number, rate=number)
            while queue.running is None:
                await asyncio.sleep(0)
            leaving = asyncio.create_task(service.worker.leave(HERE.run_id))
            await asyncio.sleep(0)
            engine.gate.set()
            assert await leaving
            await service.worker.forget(HERE.run_id)
            assert [head["learning_rate"] for head in engine.commands if head["op"] == "optim_step"] == [1]
            assert engine.adapters == {} and engine.commands[-1]["op"] == "drop"

    asyncio.run(run())
