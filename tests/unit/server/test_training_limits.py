"""Limits of training requests: seeds, numbers of rejected calls, targets, runs. The routes, a real store, no maths."""

from __future__ import annotations

import asyncio
import gc
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_worker import done, idle, new_run, running, scenario, step
from tinkex.engine.frames import Frame
from tinkex.rules import ranges
from tinkex.server.app import make_app
from tinkex.server.http.errors import RequestRejected, bad_request
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes import training
from tinkex.server.service import Service
from tinkex.server.training import queued_work, run_queue
from tinkex.server.training.run_queue import MOST_REJECTED, RunQueue
from tinkex.store.errors import Unavailable
from tinkex.store.records import OperationRecord
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.body import PROTOBUF


def request(service: Service, body: object, tenant: str = "t") -> ApiRequest:
    """A request as starlette hands it over. Bytes are protobuf, anything else goes as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = PROTOBUF if isinstance(body, bytes) else "application/json"

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    headers = [(b"content-type", kind.encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
    return ApiRequest({**scope, "app": make_app(service), "state": {"tenant": tenant}}, receive)


async def create(service: Service, number: int, seed: object) -> Any:
    body = {"session_id": "s", "model_seq_id": number, "base_model": "tinkex/tiny"}
    response = await training.create_model(request(service, {**body, "lora_config": {"rank": 4, "seed": seed}}))
    outcome = await done(service, json.loads(bytes(response.body))["request_id"])
    return json.loads(outcome.content)


@scenario
async def test_a_lora_seed_beyond_64_bits_is_not_an_internal_error(tmp_path: Path) -> None:
    """Any whole number is a seed, modulo 2^63, as it is of a sample. It was a 500 from 2^64 on."""
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        await new_run(service)
        for number, seed in enumerate([2**63, 2**64, 1e20, -1, 7], 1):
            run = await create(service, number, seed)
            assert engine.adapters[run["model_id"]] == [f"seed {int(seed) % 2**63}"]
            assert await create(service, number, seed) == run, "a retry is the same run"
        for wrong in (1.5, "x", [], True):
            with pytest.raises(RequestRejected, match="seed") as refused:
                await create(service, 99, wrong)
            assert refused.value.status == 400


def sparse_pass(run_id: str, seq_id: int, rows: int, columns: int) -> bytes:
    """A forward_backward with sparse targets, none of them listed."""
    message = pb.ForwardBackwardRequest(model_id=run_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = struct.pack(f"<{rows}i", *range(rows))
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype = pb.DTYPE_INT64
    target.sparse_csr.crow_indices = struct.pack(f"<{rows + 1}q", *[0] * (rows + 1))
    target.shape.extend([rows, columns])
    return bytes(message.SerializeToString())


@scenario
async def test_a_request_of_352_bytes_does_not_write_128_megabytes(tmp_path: Path) -> None:
    """Sparse targets of shape [1, 2^25] were accepted: their log-probabilities stayed in the journal for a day."""
    async with running(tmp_path, FakeEngine(), max_targets=1000) as service:
        queue = await new_run(service)
        for rows, columns in ((1, 2**25), (1, 301), (4, 300)):
            with pytest.raises(RequestRejected, match=r"target|log-probabilities") as refused:
                await training.forward_backward(request(service, sparse_pass(queue.run.id, 1, rows, columns)))
            assert (refused.value.status, refused.value.code) == (400, "too_many_targets")
        assert "--max-targets" in refused.value.detail
        await training.forward_backward(request(service, sparse_pass(queue.run.id, 1, 2, 300)))


@scenario
async def test_targets_are_charged_and_tokens_are_shown(tmp_path: Path) -> None:
    """A pass with many targets per position counted as one token in the shares of its tenant."""
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        response = await training.forward_backward(request(service, sparse_pass(queue.run.id, 1, 2, 300)))
        request_id = json.loads(bytes(response.body))["request_id"]
        row = await service.db(service.store.get_operation, request_id)
        assert row is not None and (row.tokens, row.cost_tokens) == (2, 3 * 600)
        await done(service, request_id)


def test_refused_numbers_are_not_remembered_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 of them were 8 MB of memory and 11 MB of database, for as long as the service exists."""

    async def run() -> None:
        async with running(tmp_path, FakeEngine(), gap_s=3600.0) as service:
            queue, wrong = await new_run(service), bad_request("Not this one.", "bad")
            row = OperationRecord(request_id="", run_id="", tenant="t", seq_id=0, kind="optim_step", digest="")
            for number in range(2, 20_002):
                queue.reject(replace(row, seq_id=number, request_id=f"op-{number}"))
            assert len(queue.taken) == len(queue.rejected) + 1 == MOST_REJECTED + 1

            monkeypatch.setattr(run_queue, "MOST_REJECTED", 20)
            for number in range(20_002, 20_102):
                await service.intake.reject(queue, number, "optim_step", wrong)
            rows = await service.db(service.store.operations_of, queue.run.id)
            assert (len(queue.taken), len(rows)) == (21, 21)
            # The newest are remembered, so that the next number does not wait for them; they may come again.
            queue.started_up_to = 20_081
            for request_id in [await step(service, queue, number, 1.0) for number in (20_100, 20_102)]:
                assert (await done(service, request_id)).error is None
            await service.db(service.store.expire_results, service.clock.wall() + 60)
            rows = await service.db(service.store.operations_of, queue.run.id)
            assert {row.state for row in rows} == {"done"}, "what was rejected is forgotten after a day"

    asyncio.run(asyncio.wait_for(run(), 30))


@scenario
async def test_queues_of_idle_runs_leave_memory_and_come_back_from_the_journal(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine, idle_session_s=0.0) as service:
        worker, queue = service.worker, await new_run(service)
        run_id = queue.run.id
        first = await step(service, queue, 1, 1.0)
        await done(service, first)
        await idle(queue)
        assert worker.forget_idle_queues() == 0, "its adapter is in the engine"
        assert await worker.evict(run_id)
        assert worker.forget_idle_queues() == 1
        # A request that had the queue already goes on with it, and others have the same one.
        await done(service, await step(service, queue, 2, 2.0))
        assert await worker.run_queue(run_id) is queue
        await idle(queue)
        await worker.evict(run_id)
        assert worker.forget_idle_queues() == 1
        del queue
        gc.collect()
        queue = await service.intake.run_queue("t", run_id)
        assert await step(service, queue, 1, 1.0) == first, "it knows what came in"
        await done(service, await step(service, queue, 3, 3.0))
        assert engine.adapters[run_id] == ["seed 7", "step 1.0", "step 2.0", "step 3.0"]


@scenario
async def test_a_run_does_not_wait_for_a_number_whose_protobuf_had_too_many_datums(tmp_path: Path) -> None:
    """It waited `gap_s` for the number, because the run of a body that is not decoded was not known."""
    async with running(tmp_path, FakeEngine(), gap_s=3600.0) as service:
        queue = await new_run(service)
        message = pb.ForwardBackwardRequest(model_id=queue.run.id, seq_id=1, loss_fn="cross_entropy")
        for _ in range(ranges.MAX_DATUMS + 1):
            message.data.add()
        with pytest.raises(RequestRejected, match="datums") as refused:
            await training.forward_backward(request(service, message.SerializeToString()))
        assert refused.value.status == 413
        assert (await done(service, await step(service, queue, 2, 1.0))).error is None
        # A body without an envelope, or of a run that is not the tenant's, is rejected all the same.
        for content, tenant, status in ((b"\x1a\x00" * 2000, "t", 413), (message.SerializeToString(), "stranger", 404)):
            with pytest.raises(RequestRejected) as refused:
                await training.forward_backward(request(service, content, tenant))
            assert refused.value.status == status


def padded_step(queue: RunQueue, rate: float, size: int = 1500) -> bytes:
    return Frame({"op": "optim_step", "adapter": queue.run.id, "learning_rate": rate, "x": "y" * size}).encode()


@scenario
async def test_the_bytes_of_waiting_operations_are_bounded_and_another_tenant_is_not_held_up(tmp_path: Path) -> None:
    """Ten thousand commands of one megabyte could wait in memory and on the disk."""
    async with running(tmp_path, FakeEngine(), max_tenant_queued_bytes=5000, max_all_queued_bytes=10_000) as service:
        queue, other = await new_run(service), await new_run(service, "u", "v")
        command = padded_step(queue, 1.0)
        service.worker.pause("test", "the test")
        accepted = [await service.intake.submit(queue, number, "optim_step", command) for number in (1, 2, 3)]
        with pytest.raises(RequestRejected, match="--max-tenant-queued-bytes") as refused:
            await service.intake.submit(queue, 4, "optim_step", command)
        assert (refused.value.status, refused.value.code) == (429, "too_many_queued_bytes")
        assert await service.intake.submit(queue, 3, "optim_step", command) == accepted[2], "a retry holds nothing more"
        accepted += [await step(service, other, 1, 2.0)]
        service.worker.unpause("test")
        for request_id in accepted:
            assert (await done(service, request_id)).error is None
        await idle(queue)
        assert [service.ledger.total(name) for name in ("queued_operations", "queued_bytes", "kept_bytes")] == [0, 0, 0]
        await done(service, await service.intake.submit(queue, 4, "optim_step", command))


@scenario
async def test_a_conflict_of_a_client_without_numbers_counts_its_operation_once(tmp_path: Path) -> None:
    """The count was given back twice if the operation whose confirmation was lost ended in the meantime."""
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        db = service.intake._db

        async def losing(call: Any, *arguments: Any) -> Any:
            result = await db(call, *arguments)
            if call == service.store.add_operation:
                service.intake._db = db
                raise Unavailable("The confirmation is lost.")
            return result

        service.intake._db = losing  # type: ignore[assignment]
        with pytest.raises(Unavailable):
            await step(service, queue, None, 1.0)
        accept = service.intake._digest

        async def slow(*arguments: Any) -> str:
            await asyncio.sleep(0.05)  # until the other operation has ended
            return await accept(*arguments)

        service.intake._digest = slow  # type: ignore[method-assign, assignment]
        assert (await done(service, await step(service, queue, None, 2.0))).error is None
        await idle(queue)
        assert [service.ledger.total(name) for name in ("queued_operations", "queued_bytes", "kept_bytes")] == [0, 0, 0]


@scenario
async def test_waiting_commands_take_little_memory_and_all_run(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        service.worker.pause("test", "the test")
        for number in range(1, 21):
            await service.intake.submit(queue, number, "optim_step", padded_step(queue, float(number), 1_000_000))
        assert (
            sum(len(pending.command or b"") for pending in queue.waiting.values()) <= queued_work.MAX_TENANT_KEPT_BYTES
        )
        last = queue.taken[20].request_id
        service.worker.unpause("test")
        await done(service, last)
        assert engine.adapters[queue.run.id] == ["seed 7", *(f"step {number}.0" for number in range(1, 21))]
        await idle(queue)
        assert service.ledger.total("kept_bytes") == 0
