"""Results are stored for a day, but no tenant fills the disk with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_worker import backward, done, idle, new_run, running, scenario
from tinkex.server.service import Service
from tinkex.server.training import stored_results
from tinkex.server.training.run_queue import RunQueue

SIZE = 70_000


class LargeResults(FakeEngine):
    """Answers every pass with more than a row holds."""

    def _reply(self, head: dict[str, Any]) -> dict[str, Any]:
        reply = super()._reply(head)
        return reply | {"metrics": {"x" * SIZE + ":sum": 1.0}} if head["op"] == "forward_backward" else reply


async def passes(service: Service, queue: RunQueue, *numbers: int) -> list[str]:
    ids = [await backward(service, queue, number) for number in numbers]
    for request_id in ids:
        assert (await done(service, request_id)).error is None
    await idle(queue)
    return ids


async def stored(service: Service, ids: list[str]) -> list[bool]:
    return [await service.db(service.store.result, request_id) is not None for request_id in ids]


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "journal").glob("??/*") if path.stat().st_size > SIZE]


@scenario
async def test_a_tenants_newer_results_take_the_room_of_its_oldest_and_of_nobody_elses(tmp_path: Path) -> None:
    async with running(tmp_path, LargeResults(), max_tenant_result_bytes=3 * SIZE + 10_000) as service:
        queue, other = await new_run(service), await new_run(service, "u", "v")
        first = await passes(service, other, 1)
        ids = await passes(service, queue, 1, 2, 3, 4, 5)
        assert await stored(service, ids) == [False, False, True, True, True]
        assert await stored(service, first) == [True]
        assert len(files(tmp_path)) == 4
        rejections = service.metrics.registry.get_sample_value(
            "tinkex_limit_rejections_total", {"limit": "max_tenant_result_bytes"}
        )
        assert rejections == 2


@scenario
async def test_results_of_an_earlier_process_count_too(tmp_path: Path) -> None:
    limit = 3 * SIZE + 10_000
    async with running(tmp_path, LargeResults(), max_tenant_result_bytes=limit) as service:
        ids = await passes(service, await new_run(service), 1, 2, 3)
    async with running(tmp_path, LargeResults(), max_tenant_result_bytes=limit) as service:
        queue = await service.intake.run_queue("t", "s:train:0")
        ids += await passes(service, queue, 4)
        assert await stored(service, ids) == [False, True, True, True]


@scenario
async def test_runs_that_end_together_after_a_restart_lose_no_new_result(tmp_path: Path) -> None:
    """A hostile reader's case: counted twice, the newest results were deleted and the oldest stayed."""
    names, limit = ("a", "b", "c", "d"), 6 * SIZE
    async with running(tmp_path, LargeResults(), max_tenant_result_bytes=limit) as service:
        for name in names:
            await passes(service, await new_run(service, name), 1)
    async with running(tmp_path, LargeResults(), max_tenant_result_bytes=limit) as service:
        queues = [await service.intake.run_queue("t", f"{name}:train:0") for name in names]
        new = [ids for (ids,) in await asyncio.gather(*(passes(service, queue, 2) for queue in queues))]
        assert await stored(service, new) == [True] * 4
        assert len(files(tmp_path)) == 5


@scenario
async def test_many_results_are_deleted_in_several_statements(tmp_path: Path) -> None:
    async with running(tmp_path, LargeResults()) as service:
        await passes(service, await new_run(service), *range(1, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_results, "MOST_AT_ONCE", 3)
        async with running(tmp_path, LargeResults(), max_tenant_result_bytes=2 * SIZE + 10_000) as service:
            await passes(service, await service.intake.run_queue("t", "s:train:0"), 9)
            assert len(files(tmp_path)) == 2


@scenario
async def test_a_result_above_the_limit_is_stored_all_the_same(tmp_path: Path) -> None:
    """Its client has to get it; the next one takes its room."""
    async with running(tmp_path, LargeResults(), max_tenant_result_bytes=1024) as service:
        queue = await new_run(service)
        ids = await passes(service, queue, 1)
        assert await stored(service, ids) == [True]
        ids += await passes(service, queue, 2)
        assert await stored(service, ids) == [False, True]
