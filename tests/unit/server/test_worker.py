"""Operations run once, in order and survive crashes: a real store, and an engine that remembers what it ran."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.fake_engine import FakeEngine
from tinkex.clock import REAL, Clock
from tinkex.engine.contract import ModelInfo
from tinkex.engine.frames import Frame
from tinkex.server.http.errors import RequestRejected, bad_request
from tinkex.server.main import build
from tinkex.server.service import Service
from tinkex.server.training.queued_work import MAX_KEPT_BYTES
from tinkex.server.training.run_queue import RunQueue
from tinkex.server.training.waiters import OperationResult
from tinkex.server.training.worker import WINDOW
from tinkex.settings import ServeConfig
from tinkex.store.blobs.bucket import Bucket
from tinkex.store.records import RunRecord, SessionRecord
from tinkex.store.store import Store

TINY = ModelInfo(name="tinkex/tiny", folder="", vocab_size=300, max_context_length=128, end_tokens=(257,))


@asynccontextmanager
async def running(
    data_dir: Path,
    engine: FakeEngine,
    model: ModelInfo = TINY,
    bucket: Bucket | None = None,
    clock: Clock = REAL,
    **settings: Any,
) -> AsyncIterator[Service]:
    defaults: dict[str, Any] = {"base_models": ("tinkex/tiny",), "gap_s": 0.2, "poll_hold_s": 5.0}
    config = ServeConfig(data_dir=data_dir, **{**defaults, **settings})
    store = Store.open(config.database_url, data_dir, bucket=bucket, cache_bytes=10**9)
    service = build(config, [model], store, engine, clock)
    await service.worker.resume()
    loop = asyncio.create_task(service.worker.run())
    try:
        yield service
    finally:
        loop.cancel()
        await service.worker.drain(0)
        service.db.close()
        store.close()


async def new_run(service: Service, name: str = "s", tenant: str = "t") -> RunQueue:
    await service.db(service.store.add_session, SessionRecord(id=name, tenant=tenant, created_at=0.0, seen_at=0.0))
    run = RunRecord(
        id=f"{name}:train:0",
        tenant=tenant,
        session_id=name,
        base_model="tinkex/tiny",
        rank=8,
        seed=7,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
        created_at=REAL.wall(),
        last_request_at=REAL.wall(),
    )
    await done(service, await service.intake.create(run, "create_model", {}))
    return await service.intake.run_queue(tenant, run.id)


async def done(service: Service, request_id: str) -> OperationResult:
    outcome = await service.waiters.wait(request_id, 10)
    assert outcome is not None, "the operation did not finish"
    return outcome


async def idle(queue: RunQueue) -> None:
    """Until what follows a result (a snapshot, say) is done too."""
    while queue.running is not None:
        await asyncio.sleep(0.002)


async def step(service: Service, queue: RunQueue, seq_id: int | None, rate: float) -> str:
    command = Frame({"op": "optim_step", "adapter": queue.run.id, "learning_rate": rate}).encode()
    return await service.intake.submit(queue, seq_id, "optim_step", command)


async def backward(service: Service, queue: RunQueue, seq_id: int, loss_fn: str = "cross_entropy") -> str:
    command = {"op": "forward_backward", "adapter": queue.run.id, "loss_fn": loss_fn, "data": [1]}
    return await service.intake.submit(queue, seq_id, "forward_backward", Frame(command).encode())


def scenario(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    """Run a coroutine as a test."""

    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path), 30))

    run.__name__ = run.__qualname__ = test.__name__
    return run


@scenario
async def test_a_retried_operation_runs_once_and_has_one_id(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        ids = await asyncio.gather(*[step(service, queue, 1, 0.5) for _ in range(20)])
        assert len(set(ids)) == 1
        await done(service, ids[0])
        assert await step(service, queue, 1, 0.5) == ids[0]
        assert engine.adapters[queue.run.id] == ["seed 7", "step 0.5"]


@scenario
async def test_other_content_under_a_used_number_is_rejected_with_400_never_409(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        await step(service, queue, 1, 0.5)
        with pytest.raises(RequestRejected) as refused:
            await step(service, queue, 1, 0.75)
        assert refused.value.status == 400
        assert "different content" in refused.value.detail


@scenario
async def test_operations_run_by_number_whatever_the_order_of_arrival(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        numbers = list(range(1, 41))
        random.Random(3).shuffle(numbers)
        ids = await asyncio.gather(*[step(service, queue, number, float(number)) for number in numbers])
        await asyncio.gather(*[done(service, request_id) for request_id in ids])
        assert engine.adapters[queue.run.id][1:] == [f"step {float(number)}" for number in range(1, 41)]


@scenario
async def test_a_gap_is_skipped_after_its_time_and_the_late_one_fails(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        assert (await done(service, await step(service, queue, 2, 2.0))).error is None
        late = await done(service, await step(service, queue, 1, 1.0))
        assert late.category == "user"
        assert "arrived after operation 2" in str(late.error)
        assert engine.adapters[queue.run.id] == ["seed 7", "step 2.0"]


@scenario
async def test_a_rejected_number_does_not_delay_the_next(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), gap_s=3600.0) as service:
        queue = await new_run(service)
        await service.intake.reject(queue, 1, "forward_backward", bad_request("wrong data"))
        await done(service, await step(service, queue, 2, 1.0))  # fails after ten seconds, not after an hour


@scenario
async def test_a_failed_operation_fails_alone(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        ids = [
            await backward(service, queue, 1),
            await backward(service, queue, 2, "broken"),
            await step(service, queue, 3, 1.0),
        ]
        outcomes = [await done(service, request_id) for request_id in ids]
        assert [outcome.error is None for outcome in outcomes] == [True, False, True]
        assert outcomes[1].category == "user"
        assert engine.adapters[queue.run.id] == ["seed 7", "fb 1", "step 1.0"]


@scenario
async def test_after_an_engine_crash_the_adapter_is_rebuilt_and_nothing_runs_twice(tmp_path: Path) -> None:
    engine, dice = FakeEngine(), random.Random(5)
    engine.deaths = [lambda head: dice.random() < 0.1 for _ in range(6)]
    expected = ["seed 7"]
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        for number in range(1, 60, 2):
            ids = [await backward(service, queue, number), await step(service, queue, number + 1, float(number))]
            for request_id in ids:
                assert (await done(service, request_id)).error is None
            expected += ["fb 1", f"step {float(number)}"]
        assert engine.generation > 2
        assert engine.adapters[queue.run.id] == expected


@scenario
async def test_an_operation_that_keeps_killing_the_engine_fails_and_the_run_goes_on(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        await done(service, await step(service, queue, 1, 1.0))
        engine.deaths = [lambda head: head["op"] == "forward_backward"] * 3
        poison = await done(service, await backward(service, queue, 2))
        assert poison.category == "server"
        assert "died 3 times" in str(poison.error)
        assert (await done(service, await step(service, queue, 3, 3.0))).error is None
        assert engine.adapters[queue.run.id] == ["seed 7", "step 1.0", "step 3.0"]


@scenario
async def test_the_engine_gets_the_very_bytes_that_the_journal_stored(tmp_path: Path) -> None:
    """When an operation runs, and when it is replayed: small ones from memory, others from the journal."""
    # No encoder of ours writes a head like this one: whatever decodes and encodes it again changes it.
    head = b'{ "op": "forward_backward", "adapter": "s:train:0", "loss_fn": "x", "data": [1], "_sizes": [%d]}'
    stored = []
    for size in (8, MAX_KEPT_BYTES + 1):
        head_of_size = head % size
        stored.append(struct.pack("<IQ", len(head_of_size), size) + head_of_size + bytes(size))
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        for number, command in enumerate(stored, 1):
            await done(service, await service.intake.submit(queue, number, "forward_backward", command))
        assert engine.received[-2:] == [(command, "t") for command in stored]
        engine.die()
        await done(service, await step(service, queue, 3, 1.0))
        assert engine.received[-3:-1] == [(command, "t") for command in stored], "replayed"


@scenario
async def test_a_restarted_service_finishes_what_was_accepted(tmp_path: Path) -> None:
    first = FakeEngine()
    async with running(tmp_path, first) as service:
        queue = await new_run(service)
        await done(service, await step(service, queue, 1, 1.0))
        first.gate.clear()  # nothing finishes any more
        ids = [await step(service, queue, number, float(number)) for number in (2, 3, 4)]
    second = FakeEngine()
    async with running(tmp_path, second) as service:
        for request_id in ids:
            assert (await done(service, request_id)).error is None
        queue = await service.intake.run_queue("t", "s:train:0")
        assert await step(service, queue, 3, 3.0) == ids[1]
        assert second.adapters[queue.run.id] == ["seed 7", *[f"step {float(n)}" for n in (1, 2, 3, 4)]]


@scenario
async def test_a_snapshot_stands_for_the_journal_before_it(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine, snapshot_every_s=0.0) as service:
        queue = await new_run(service)
        for number in range(1, 6):
            await done(service, await step(service, queue, number, float(number)))
        engine.die()
        before = len(engine.commands)
        await done(service, await step(service, queue, 6, 6.0))
        replayed = [head["op"] for head in engine.commands[before:]]
        assert replayed[0] == "restore"
        assert replayed.count("optim_step") == 1
        assert engine.adapters[queue.run.id] == ["seed 7", *[f"step {float(n)}" for n in range(1, 7)]]
        await idle(queue)
        folders = list((tmp_path / "journal" / "snapshots").iterdir())
        assert len(folders) == 1, "former snapshots are removed"


@scenario
async def test_a_snapshot_is_due_by_a_runs_own_share_of_the_engines_time(tmp_path: Path) -> None:
    """64 runs that share a pass of ten seconds have a sixth of a second each to repeat."""
    engine = FakeEngine()
    async with running(tmp_path, engine, snapshot_every_s=10.0) as service:
        queue = await new_run(service)
        for number, (own_s, count) in enumerate(((4.0, 0), (5.9, 0), (0.2, 1), (9.9, 1)), 1):
            engine.pass_s = own_s
            await done(service, await backward(service, queue, number))
            await idle(queue)
            assert sum(head["op"] == "snapshot" for head in engine.commands) == count


@scenario
async def test_a_load_survives_a_crash_even_if_its_source_is_deleted(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        await done(service, await step(service, queue, 1, 1.0))
        await done(service, await service.intake.submit(queue, 2, "save_weights", b"", options={"name": "a"}))
        await done(service, await step(service, queue, 3, 3.0))
        path = "tinker://s:train:0/weights/a"
        options = {"path": path, "optimizer": False}
        await done(service, await service.intake.submit(queue, 4, "load_weights", b"", options=options))
        await service.db(service.store.delete_checkpoint, path)
        engine.die()
        await done(service, await step(service, queue, 5, 5.0))
        assert engine.adapters[queue.run.id] == ["seed 7", "step 1.0", "step 5.0"]


@scenario
async def test_an_evicted_run_comes_back_as_it_was(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        await done(service, await backward(service, queue, 1))
        await idle(queue)
        assert await service.worker.evict(queue.run.id)
        assert queue.run.id not in engine.adapters
        await done(service, await step(service, queue, 2, 1.0))
        assert engine.adapters[queue.run.id] == ["seed 7", "fb 1", "step 1.0"]


@scenario
async def test_a_used_checkpoint_name_is_rejected_unless_overwriting_is_allowed(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)

        async def save(number: int, overwrite: bool | None) -> OperationResult:
            options = {"name": "a", "overwrite": overwrite}
            return await done(service, await service.intake.submit(queue, number, "save_weights", b"", options=options))

        assert (await save(1, False)).error is None
        assert "exists already" in str((await save(2, False)).error)
        assert (await save(3, True)).error is None
        assert (await save(4, None)).error is None, "clients before 0.20 do not say, and expect it to work"
        await idle(queue)
        saved = list((tmp_path / "checkpoints" / "s:train:0" / "weights").iterdir())
        assert len(saved) == 1, "replaced files are removed"


@scenario
async def test_the_queue_is_bounded_per_tenant(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine, max_queued_operations=3) as service:
        queue = await new_run(service)
        other = await new_run(service, "s2", "other")
        engine.gate.clear()
        for number in (1, 2, 3):
            await step(service, queue, number, 1.0)
        with pytest.raises(RequestRejected) as refused:
            await step(service, queue, 4, 1.0)
        assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
        await step(service, other, 1, 1.0)
        engine.gate.set()


@scenario
async def test_a_tenant_with_many_runs_does_not_keep_another_out_of_the_engine(tmp_path: Path) -> None:
    """Only so many operations are in the engine at once; whose is next when one ends is for the scheduler to say."""
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        many = [await new_run(service, f"many{number}", "greedy") for number in range(WINDOW + 20)]
        late = await new_run(service, "late", "modest")
        engine.gate.clear()
        before = len(engine.commands)
        for queue in many:
            await backward(service, queue, 1)
        await backward(service, late, 1)
        engine.gate.set()
        for queue in (*many, late):
            await done(service, str(queue.taken[1].request_id))
        order = [head["adapter"] for head in engine.commands[before:]]
        assert order.index(late.run.id) <= WINDOW + 1, "it ran before those that the window had kept out"


@scenario
async def test_a_run_is_unknown_to_other_tenants(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        with pytest.raises(RequestRejected) as refused:
            await service.intake.run_queue("stranger", queue.run.id)
        assert refused.value.status == 404


@scenario
async def test_the_reason_for_waiting_names_what_is_waited_for(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine, gap_s=60.0) as service:
        queue, worker = await new_run(service), service.worker
        first, fourth = await step(service, queue, 2, 0.5), await step(service, queue, 4, 0.5)
        pending = worker.pending(fourth)
        assert pending is not None
        assert worker.queue_of(pending) == ("active", "waits for operation 1 of this run, which has not arrived")
        engine.gate.clear()
        await step(service, queue, 1, 0.5)
        await step(service, queue, 3, 0.5)
        await asyncio.sleep(0)
        assert worker.queue_of(pending) == ("active", "3 operations of this run before it")
        engine.is_ready = False
        assert worker.queue_of(pending) == ("paused_capacity", "the engine is not ready: loading")
        worker.pause("disk", "disk full")
        assert worker.queue_of(pending) == ("paused_capacity", "disk full")
        worker.unpause("disk")
        engine.is_ready = True
        engine.gate.set()
        await done(service, first)
        await done(service, fourth)
