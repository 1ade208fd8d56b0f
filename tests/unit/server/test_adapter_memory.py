"""Adapters share a budget of bytes in the engine: idle runs leave, busy ones take turns, nothing fails or is lost."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from starlette.responses import Response

from tests.unit.server.fake_engine import FakeEngine, head_of
from tests.unit.server.test_imports import WEIGHTS, tar
from tests.unit.server.test_sample_queue import submit
from tests.unit.server.test_worker import backward, done, idle, new_run, running, scenario, step
from tinkex.clock import REAL
from tinkex.engine.contract import EngineState, OutOfMemory, SampleEvent, SampleSpec
from tinkex.engine.frames import Frame
from tinkex.server.app import make_app
from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes import copies
from tinkex.server.service import Service
from tinkex.server.training import adapter_memory
from tinkex.server.training.adapter_memory import Activity, AdapterMemory
from tinkex.server.training.run_queue import PendingOperation, RunQueue
from tinkex.server.training.worker import WINDOW
from tinkex.store.errors import DiskFull
from tinkex.store.records import OperationRecord

RANK = 8
"""Of `new_run`."""
SIZES: Mapping[str, Mapping[str, int]] = {"tinkex/tiny": {"train_attn": 2000, "train_mlp": 2000, "train_unembed": 3812}}
"""A run of `new_run` takes 8 × 7,812 × 16 bytes: a megabyte, all but 64 bytes."""


class SizedEngine(FakeEngine):
    """Knows how large adapters are, and counts how many it had at once. `room` adapters fit into its memory."""

    def __init__(self, room: int = 1000) -> None:
        super().__init__()
        self.room, self.most, self.failures = room, 0, 0

    @property
    def state(self) -> EngineState:
        return replace(super().state, lora_sizes=SIZES)

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        head = head_of(command)
        needs = head["op"] in ("create", "restore", "forward_backward")
        if needs and len(self.adapters.keys() | {head["adapter"]}) > self.room:
            self.failures += 1
            raise OutOfMemory("Out of memory in a pass.", "server")
        reply = await super().run(command, tenant=tenant)
        self.most = max(self.most, len(self.adapters))
        return reply


async def runs_of(service: Service, count: int, tenant: str = "t") -> list[RunQueue]:
    return [await new_run(service, f"{tenant}{number}", tenant) for number in range(count)]


async def train(service: Service, queue: RunQueue, steps: int) -> list[str]:
    """Submit all at once, as a client that does not await; return what the adapter then is."""
    ids = []
    for number in range(1, steps + 1):
        ids.append(await backward(service, queue, 2 * number - 1))
        ids.append(await step(service, queue, 2 * number, float(number)))
    for request_id in ids:
        assert (await done(service, request_id)).error is None
    return ["seed 7", *(entry for number in range(1, steps + 1) for entry in ("fb 1", f"step {float(number)}"))]


async def state_of(service: Service, engine: FakeEngine, queue: RunQueue) -> list[str]:
    await done(service, await service.intake.submit(queue, None, "forward", forward_of(queue)))
    return engine.adapters[queue.run.id]


def forward_of(queue: RunQueue) -> bytes:
    return Frame({"op": "forward", "adapter": queue.run.id, "loss_fn": "cross_entropy", "data": [1]}).encode()


@scenario
async def test_idle_models_of_one_tenant_leave_memory_for_the_next_one(tmp_path: Path) -> None:
    """560 adapters were in the engine at once; nothing left before a session had been idle for ten minutes."""
    engine = SizedEngine()
    async with running(tmp_path, engine, adapter_memory_mb=3) as service:
        queues = await runs_of(service, 12)
        assert (engine.most, len(service.worker.resident())) == (3, 3)
        assert service.worker.memory.used_bytes <= 3_000_000
        expected = await train(service, queues[0], 1)
        for number in range(6):
            await new_run(service, f"next{number}")
        assert queues[0].run.id not in engine.adapters
        assert await state_of(service, engine, queues[0]) == expected, "it came back as it was"
        assert engine.most == 3


@scenario
async def test_the_least_recently_used_idle_run_leaves_first(tmp_path: Path) -> None:
    engine = SizedEngine()
    async with running(tmp_path, engine, adapter_memory_mb=3) as service:
        queues = await runs_of(service, 3)
        await done(service, await step(service, queues[0], 1, 1.0))
        await new_run(service, "next")
        await idle(queues[0])
        assert set(engine.adapters) == {queues[0].run.id, queues[2].run.id, "next:train:0"}


def test_six_runs_that_are_always_busy_share_room_for_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait and take turns: none fails, none waits for ever, and each ends as it would alone."""
    monkeypatch.setattr(adapter_memory, "LEAST_STAY_S", 0.02)

    async def run() -> None:
        engine = SizedEngine()
        async with running(tmp_path, engine, adapter_memory_mb=2) as service:
            queues = [*await runs_of(service, 5), *await runs_of(service, 1, "other")]
            expected = await asyncio.gather(*[train(service, queue, 20) for queue in queues])
            for queue, state in zip(queues, expected, strict=True):
                assert await state_of(service, engine, queue) == state
            assert engine.most == 2

    asyncio.run(asyncio.wait_for(run(), 30))


@scenario
async def test_a_tenant_with_many_busy_models_does_not_push_out_one_with_a_single_model(tmp_path: Path) -> None:
    engine = SizedEngine()
    async with running(tmp_path, engine, adapter_memory_mb=3) as service:
        alice = await new_run(service, "alice", "alice")
        bobs = await runs_of(service, 8, "bob")
        await done(service, await step(service, alice, 1, 1.0))
        loads = len([head for head in engine.commands if head.get("adapter") == alice.run.id])
        busy = asyncio.gather(*[train(service, queue, 10) for queue in bobs])
        for number in range(2, 30):
            await done(service, await step(service, alice, number, 1.0))
        await busy
        commands = [head["op"] for head in engine.commands if head.get("adapter") == alice.run.id][loads:]
        assert commands.count("restore") + commands.count("create") <= 2, commands


@scenario
async def test_an_adapter_larger_than_all_memory_is_rejected_when_it_is_created(tmp_path: Path) -> None:
    async with running(tmp_path, SizedEngine(), adapter_memory_mb=1) as service:
        queue = await new_run(service)
        large = replace(queue.run, id="s:train:1", rank=2 * RANK)
        with pytest.raises(
            RequestRejected, match=r"rank 16 .* 2 MB .* limit is 1 \(--adapter-memory-mb\).*lower"
        ) as no:
            await service.intake.create(large, "create_model", {})
        assert (no.value.status, no.value.code) == (400, "adapter_too_large")


@scenario
async def test_a_run_of_before_that_is_larger_than_the_budget_still_works(tmp_path: Path) -> None:
    async with running(tmp_path, SizedEngine()) as service:
        queue = await new_run(service)
        await done(service, await step(service, queue, 1, 1.0))
    engine = SizedEngine()
    async with running(tmp_path, engine, adapter_memory_mb=1) as service:
        service.worker.memory.budget_bytes = 500_000
        queue = await service.intake.run_queue("t", queue.run.id)
        assert await state_of(service, engine, queue) == ["seed 7", "step 1.0"]


@scenario
async def test_a_tenant_with_too_many_models_is_rejected_and_others_are_not(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), max_models=2) as service:
        first, _ = await runs_of(service, 2)
        with pytest.raises(RequestRejected, match=r"3 training runs.*--max-models.*Unload") as no:
            await new_run(service, "third")
        assert (no.value.status, no.value.code) == (400, "too_many_models")
        again = replace(first.run)
        assert await service.intake.create(again, "create_model", {}) == first.taken[0].request_id, "a retry is no run"
        await new_run(service, "hers", "other")
        await done(service, await service.intake.submit(first, 1, "unload_model", b""))
        await new_run(service, "fourth")


@scenario
async def test_anothers_idle_models_do_not_make_a_pass_fail_for_want_of_memory(tmp_path: Path) -> None:
    """Alice's passes failed for good with "Out of memory in a pass" while Bob's idle models stayed in memory."""
    engine = SizedEngine()
    async with running(tmp_path, engine) as service:
        bobs = await runs_of(service, 20, "bob")
        expected = await train(service, bobs[3], 1)
        alice = await new_run(service, "alice", "alice")
        carol = await new_run(service, "carol", "carol")
        engine.room = 10
        assert (await done(service, await backward(service, alice, 1))).error is None
        assert carol.run.id in engine.adapters, "those of the tenant with the most leave first"
        assert 1 <= engine.failures <= 5, "more leave each time"
        assert len(engine.adapters) <= 10
        assert await state_of(service, engine, bobs[3]) == expected


@scenario
async def test_a_pass_fails_for_want_of_memory_only_if_no_adapter_is_left_to_evict(tmp_path: Path) -> None:
    engine = SizedEngine()
    async with running(tmp_path, engine) as service:
        alice, _ = await runs_of(service, 2)
        engine.room = 0
        outcome = await done(service, await backward(service, alice, 1))
        assert "Out of memory" in str(outcome.error) and list(engine.adapters) == [alice.run.id]
        engine.room = 1
        assert (await done(service, await backward(service, alice, 2))).error is None


class TooLarge(FakeEngine):
    """Has no memory for the passes of one run, whoever else is there; between two of them another run comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.run_id, self.tries = "", 0
        self.come_back: Callable[[], Awaitable[object]] | None = None

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        head = head_of(command)
        if head["op"] == "forward_backward" and head["adapter"] == self.run_id:
            self.tries += 1
            assert self.come_back is not None
            await self.come_back()
            raise OutOfMemory("Out of memory in a pass.", "server")
        return await super().run(command, tenant=tenant)


@scenario
async def test_a_pass_that_is_too_large_by_itself_does_not_evict_others_for_ever(tmp_path: Path) -> None:
    engine = TooLarge()
    async with running(tmp_path, engine) as service:
        alice = await new_run(service, "alice", "alice")
        bob = await new_run(service, "bob", "bob")
        engine.run_id, engine.come_back = alice.run.id, lambda: state_of(service, engine, bob)
        outcome = await done(service, await backward(service, alice, 1))
        assert "Out of memory" in str(outcome.error)
        assert engine.tries == 2


@scenario
async def test_a_run_whose_snapshot_cannot_be_written_leaves_all_the_same(tmp_path: Path) -> None:
    engine = SizedEngine()
    async with running(tmp_path, engine, adapter_memory_mb=1) as service:
        queue = await new_run(service)
        expected = await train(service, queue, 2)

        def full(*given: object) -> None:
            raise DiskFull

        real, service.store.set_snapshot = service.store.set_snapshot, full  # type: ignore[method-assign, assignment]
        await new_run(service, "next")
        service.store.set_snapshot = real  # type: ignore[method-assign]
        assert list(engine.adapters) == ["next:train:0"]
        assert await state_of(service, engine, queue) == expected


@scenario
async def test_the_engine_dies_while_runs_wait_for_room_and_all_finish(tmp_path: Path) -> None:
    engine = SizedEngine()
    async with running(tmp_path, engine, adapter_memory_mb=2) as service:
        queues = await runs_of(service, 5)
        engine.deaths = [lambda head: head["op"] == "optim_step"] * 4
        expected = await asyncio.gather(*[train(service, queue, 3) for queue in queues])
        for queue, state in zip(queues, expected, strict=True):
            assert await state_of(service, engine, queue) == state


@scenario
async def test_the_loop_is_not_blocked_by_many_active_runs_while_others_wait_for_memory(tmp_path: Path) -> None:
    """With 1,000 runs in memory, 2,000 active ones and 64 that waited, every look at them blocked the loop for 210 ms.

    Counts calls, not seconds: each run summed up all adapters, and looked through all that waited.
    """
    resident, waiting = 300, 64
    async with running(tmp_path, SizedEngine(), adapter_memory_mb=resident) as service:
        worker, memory = service.worker, service.worker.memory
        run = (await new_run(service)).run
        for number in range(resident):
            queue = worker._queues[f"r{number}"] = RunQueue(replace(run, id=f"r{number}", tenant=f"t{number % 10}"))
            row = OperationRecord(
                request_id="", run_id=queue.run.id, tenant=queue.run.tenant, seq_id=0, kind="optim_step", digest=""
            )
            queue.waiting[0] = PendingOperation(row, 0.0)
            worker._active.add(queue.run.id)
            await memory.reserve(queue.run.id, queue.run.tenant, 10**6)
            memory._adapters[queue.run.id].stays_until = 0.0
        line = [asyncio.create_task(memory.reserve(f"w{number}", "new", 10**6)) for number in range(waiting)]
        await asyncio.sleep(0)
        calls = 0

        def count(*event: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        heads, _ = worker._heads(0.0)
        sys.setprofile(None)
        assert not heads, "all have to leave for those that wait"
        assert calls < 40 * resident
        worker._active.clear()
        for task in line:
            task.cancel()
        await asyncio.gather(*line, return_exceptions=True)


@scenario
async def test_a_run_that_had_to_leave_goes_on_when_another_left_first(tmp_path: Path) -> None:
    """The loop was woken only once nothing waited any more, so a run could rest although no one wanted its room."""
    wakes: list[int] = []
    memory = AdapterMemory(
        2, REAL, FakeEngine(), lambda run_id: Activity.BUSY, AsyncMock(return_value=False), lambda: wakes.append(1)
    )
    for run_id in ("a", "b"):
        await memory.reserve(run_id, "t", 1)
    wakes.clear()
    line = [asyncio.create_task(memory.reserve(run_id, "t", 1)) for run_id in ("c", "d")]
    await asyncio.sleep(0)
    memory.release("a")
    await line[0]
    assert wakes == [1] and not line[1].done()
    memory.release("b")
    await line[1]


class BlockingEngine(SizedEngine):
    """Does not end the steps of one adapter until `unblocked` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked, self.unblocked = "", asyncio.Event()

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        head = head_of(command)
        if head["op"] == "optim_step" and head["adapter"] == self.blocked:
            await self.unblocked.wait()
        return await super().run(command, tenant=tenant)


@scenario
async def test_runs_that_wait_for_memory_do_not_stop_those_that_are_in_it(tmp_path: Path) -> None:
    """64 runs of one tenant that waited for memory took the whole window: all tenants went from 292 to 12 a second."""
    engine = BlockingEngine()
    async with running(tmp_path, engine, adapter_memory_mb=2) as service:
        bobs = await runs_of(service, WINDOW + 6, "bob")
        alice = await new_run(service, "alice", "alice")
        engine.blocked = bobs[-1].run.id
        ids = [await step(service, queue, 1, 1.0) for queue in reversed(bobs)]
        for number in (1, 2, 3):
            request_id = await step(service, alice, number, 1.0)
            assert await service.waiters.wait(request_id, 2) is not None, "it is in memory, and waits for Bob's runs"
        assert 0 < service.worker.memory.waiting < WINDOW // 2, "they wait in their queues"
        engine.unblocked.set()
        for request_id in ids:
            assert (await done(service, request_id)).error is None


class ImportEngine(SizedEngine):
    """Loads any adapter."""

    def _reply(self, head: dict[str, Any]) -> dict[str, Any]:
        return {} if head["op"] == "load" else super()._reply(head)


async def import_rank(service: Service, rank: int, tenant: str = "t") -> Response:
    """Import an adapter of the attention: rank 31 takes a megabyte."""
    config = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 16}).encode()
    body = tar(adapter_config__json=config, adapter_model__safetensors=WEIGHTS)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    query = b"base_model=tinkex/tiny&name=mine"
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": query, "headers": []}
    request = ApiRequest({**scope, "app": make_app(service), "state": {"tenant": tenant}}, receive)
    return await copies.import_weights(request)


@scenario
async def test_an_import_larger_than_all_memory_is_rejected_before_the_engine_has_it(tmp_path: Path) -> None:
    engine = ImportEngine()
    async with running(tmp_path, engine, adapter_memory_mb=2) as service:
        with pytest.raises(RequestRejected, match=r"rank 64 .* 3 MB .* limit is 2 \(--adapter-memory-mb\)") as no:
            await import_rank(service, 64)
        assert (no.value.status, no.value.code, engine.commands) == (400, "adapter_too_large", [])


@scenario
async def test_imports_do_not_fill_the_engine_beyond_its_budget(tmp_path: Path) -> None:
    """Each import created an adapter in the engine, whatever its memory held: one tenant could push out all others."""
    engine = ImportEngine()
    async with running(tmp_path, engine, adapter_memory_mb=3, max_uploads=10) as service:
        await runs_of(service, 3, "bob")
        answers = await asyncio.gather(*[import_rank(service, 31) for _ in range(6)])
        assert [answer.status_code for answer in answers] == [200] * 6
        assert engine.most == 3
        assert len(engine.adapters) == 2, "one of Bob's left, and every import is gone"
        assert service.worker.memory.used_bytes == 2 * RANK * 7812 * 16


@scenario
async def test_an_import_does_not_fail_for_want_of_memory_while_idle_runs_have_some(tmp_path: Path) -> None:
    engine = ImportEngine()
    async with running(tmp_path, engine) as service:
        await runs_of(service, 4, "bob")
        engine.room = 4
        assert (await import_rank(service, 31)).status_code == 200
        engine.room = 0
        with pytest.raises(RequestRejected, match="Out of memory") as no:
            await import_rank(service, 31)
        assert (no.value.status, service.worker.memory.used_bytes) == (500, 0)


class FullForSamples(SizedEngine):
    """Has no memory for a sample while more than `sample_room` adapters are in it."""

    sample_room = 0

    async def sample(self, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        if len(self.adapters) > self.sample_room:
            self.samples.append(spec)
            raise OutOfMemory("The engine had not enough memory.", "server")
        async for event in super().sample(spec):
            yield event


@scenario
async def test_a_sample_that_runs_out_of_memory_is_sampled_once_idle_runs_have_left(tmp_path: Path) -> None:
    engine = FullForSamples()
    async with running(tmp_path, engine) as service:
        queues = await runs_of(service, 5)
        expected = await train(service, queues[0], 1)
        for queue in queues:
            await idle(queue)
        sample = submit(service)
        await service.sampling.wait(sample, 5)
        assert sample.result is not None and sample.error is None
        assert (len(engine.samples), service.worker.resident()) == (3, []), "2 left, then the other 3"
        assert await state_of(service, engine, queues[0]) == expected, "it came back as it was"


@scenario
async def test_a_sample_that_runs_out_of_memory_fails_when_no_run_is_left_to_leave(tmp_path: Path) -> None:
    engine = FullForSamples()
    engine.sample_room = -1
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        await idle(queue)
        sample = submit(service)
        await service.sampling.wait(sample, 5)
        assert sample.error == ("The engine had not enough memory.", "server")
        assert (len(engine.samples), service.worker.resident()) == (2, [])
        engine.sample_room = 0
        again = submit(service)
        await service.sampling.wait(again, 5)
        assert again.result is not None, "the next sample succeeds"
