"""Shutdowns, crashes and full disks: nothing is lost, nothing runs twice, no tenant pays for another's operation."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.responses import Response

from tests.unit.server.fake_engine import FakeEngine, head_of
from tests.unit.server.test_worker import TINY, backward, done, new_run, running, scenario, step
from tinkex.engine.contract import EngineDied, EngineFault, EngineUnusable
from tinkex.engine.frames import Frame
from tinkex.server.app import make_app
from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes import futures, sampling
from tinkex.server.service import Service
from tinkex.store import database
from tinkex.store.database import values_of
from tinkex.store.errors import DiskFull, Unavailable
from tinkex.store.records import OperationRecord
from tinkex.store.tables import operations


def request(service: Service, body: dict[str, Any], tenant: str = "t") -> ApiRequest:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    return ApiRequest({**scope, "app": make_app(service), "state": {"tenant": tenant}}, receive)


async def poll(service: Service, request_id: str, tenant: str = "t") -> Response:
    return await futures.retrieve_future(request(service, {"request_id": request_id}, tenant))


@scenario
async def test_a_poll_during_shutdown_says_try_again_and_not_unknown(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        engine.gate.clear()
        request_id = await step(service, queue, 1, 1.0)
        polling = asyncio.create_task(poll(service, request_id))
        await asyncio.sleep(0.05)
        await service.worker.drain(0)
        assert (await polling).status_code == 408
        with pytest.raises(RequestRejected) as refused:
            await poll(service, request_id, "stranger")
        assert refused.value.status == 404


@scenario
async def test_an_expired_result_is_410_for_its_tenant_and_404_for_others(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        row = OperationRecord(
            request_id="old", run_id=queue.run.id, tenant="t", seq_id=9, kind="optim_step", digest="", state="done"
        )
        await service.db(service.store.add_operation, row, None)
        for tenant, status in (("t", 410), ("stranger", 404)):
            with pytest.raises(RequestRejected) as refused:
                await poll(service, "old", tenant)
            assert refused.value.status == status


class Slow(FakeEngine):
    """A pass takes 20 ms and a step 60 ms, so that a pass that kills the engine takes the steps with it."""

    async def run(self, command: Frame | bytes, *, tenant: str = "") -> Frame:
        generation = self.generation
        for _ in range({"forward_backward": 20, "optim_step": 60}.get(head_of(command)["op"], 0)):
            await asyncio.sleep(0.001)
            if self.generation != generation:
                raise EngineDied("killed by signal 9")
        return await super().run(command, tenant=tenant)


class Unusable(FakeEngine):
    """Starts on the second service only."""

    async def ready(self) -> None:
        raise EngineUnusable("The engine could not start: it was killed by signal 9.", "server")


@scenario
async def test_operations_are_not_failed_for_good_when_the_engine_cannot_start(tmp_path: Path) -> None:
    """Seed 211 of the fault harness: a server was killed, and the first engine of the next one too."""
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        engine.gate.clear()
        request_id = await step(service, queue, 1, 1.0)
    async with running(tmp_path, Unusable()) as service:
        await asyncio.sleep(0.05)
        row = await service.db(service.store.get_operation, request_id)
        assert row is not None and row.state == "queued", row
    async with running(tmp_path, FakeEngine()) as service:
        assert (await done(service, request_id)).error is None


@scenario
async def test_an_operation_that_keeps_killing_the_engine_fails_alone(
    tmp_path: Path,
) -> None:
    engine = Slow()
    async with running(tmp_path, engine) as service:
        guilty = await new_run(service)
        others = [await new_run(service, f"s{number}", f"t{number}") for number in range(3)]
        engine.deaths = [lambda head: head["op"] == "forward_backward"] * 3
        steps = [await step(service, queue, 1, 1.0) for queue in others]
        poison = await done(service, await backward(service, guilty, 1))
        assert "died 3 times" in str(poison.error)
        for queue, request_id in zip(others, steps, strict=True):
            assert (await done(service, request_id)).error is None
            await done(service, await step(service, queue, 2, 2.0))
            assert engine.adapters[queue.run.id] == ["seed 7", "step 1.0", "step 2.0"]


@scenario
async def test_an_operation_that_was_late_just_before_a_crash_fails_after_the_restart(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        await done(service, await step(service, queue, 2, 2.0))
        late = OperationRecord(
            request_id="late", run_id=queue.run.id, tenant="t", seq_id=1, kind="optim_step", digest="", created_at=1.0
        )
        command = Frame({"op": "optim_step", "adapter": queue.run.id, "learning_rate": 1.0}).encode()
        await service.db(service.store.add_operation, late, command)
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        found = await done(service, "late")
        assert found.category == "user"
        queue = await service.intake.run_queue("t", "s:train:0")
        await done(service, await step(service, queue, 3, 3.0))
        assert engine.adapters[queue.run.id] == ["seed 7", "step 2.0", "step 3.0"]


@scenario
async def test_a_load_whose_snapshot_fails_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        await done(service, await service.intake.submit(queue, 1, "save_weights", b"", options={"name": "a"}))
        await done(service, await step(service, queue, 2, 2.0))

        def full(*given: object) -> None:
            raise DiskFull

        keep, service.store.set_snapshot = service.store.set_snapshot, full  # type: ignore[method-assign, assignment]
        options = {"path": "tinker://s:train:0/weights/a", "optimizer": False}
        loaded = await done(service, await service.intake.submit(queue, 3, "load_weights", b"", options=options))
        assert "disk is full" in str(loaded.error)
        service.store.set_snapshot = keep  # type: ignore[method-assign]
        await done(service, await step(service, queue, 4, 4.0))
        assert engine.adapters[queue.run.id] == ["seed 7", "step 2.0", "step 4.0"]


@scenario
async def test_a_load_whose_snapshot_cannot_be_written_fails_once_and_does_not_spin(tmp_path: Path) -> None:
    """It was tried again for ever, without a pause: 1,414 times in two seconds."""

    class FullDisk(FakeEngine):
        is_full = False

        def _reply(self, head: dict[str, Any]) -> dict[str, Any]:
            if self.is_full and head["op"] == "snapshot":
                raise EngineFault("No space left on device.", "server")
            return super()._reply(head)

    engine = FullDisk()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        await done(service, await service.intake.submit(queue, 1, "save_weights", b"", options={"name": "a"}))
        await done(service, await step(service, queue, 2, 0.5))
        engine.is_full = True
        options = {"path": f"tinker://{queue.run.id}/weights/a", "optimizer": False}
        request_id = await service.intake.submit(queue, 3, "load_weights", b"", options=options)
        outcome = await service.waiters.wait(request_id, 3)
        assert outcome is not None and outcome.error == "No space left on device."
        assert [head["op"] for head in engine.commands].count("load") == 1
        await done(service, await step(service, queue, 4, 0.25))
        assert engine.adapters[queue.run.id] == ["seed 7", "step 0.5", "step 0.25"], "as it was before the load"


@pytest.mark.parametrize("step_of_load", ["get_readable_checkpoint", "set_snapshot", "set_snapshot, confirmation lost"])
def test_load_weights_does_not_fail_for_good_while_the_database_is_away(tmp_path: Path, step_of_load: str) -> None:
    """Seed 138 of the fault harness: it failed with "The database does not respond"."""

    async def run() -> None:
        engine = FakeEngine()
        async with running(tmp_path, engine) as service:
            queue = await new_run(service)
            await done(service, await step(service, queue, 1, 1.0))
            await done(service, await service.intake.submit(queue, 2, "save_weights", b"", options={"name": "a"}))
            await done(service, await step(service, queue, 3, 3.0))
            name, _, is_lost = step_of_load.partition(", ")
            real, calls = getattr(service.store, name), []

            def away(*values: Any) -> Any:
                calls.append(values)
                if len(calls) > 1:
                    return real(*values)
                if is_lost:
                    real(*values)
                raise Unavailable("The database does not respond.")

            setattr(service.store, name, away)
            options = {"path": "tinker://s:train:0/weights/a", "optimizer": False}
            loaded = await done(service, await service.intake.submit(queue, 4, "load_weights", b"", options=options))
            assert loaded.error is None and len(calls) == 2
            await done(service, await step(service, queue, 5, 5.0))
            assert engine.adapters[queue.run.id] == ["seed 7", "step 1.0", "step 5.0"]

    asyncio.run(asyncio.wait_for(run(), 30))


@scenario
async def test_two_operations_without_a_number_are_two_operations(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        ids = await asyncio.gather(*[step(service, queue, None, 1.0) for _ in range(3)])
        assert len(set(ids)) == 3
        for request_id in ids:
            await done(service, request_id)
        assert engine.adapters[queue.run.id] == ["seed 7", *["step 1.0"] * 3]


def lose_confirmation(service: Service) -> None:
    """Store the next operation, and lose the database's word that it is stored."""
    add = service.store.add_operation

    def lost(*values: Any) -> None:
        setattr(service.store, "add_operation", add)  # noqa: B010
        add(*values)
        raise Unavailable("The database does not respond.")

    setattr(service.store, "add_operation", lost)  # noqa: B010


@scenario
async def test_a_lost_confirmation_does_not_wedge_clients_without_numbers(tmp_path: Path) -> None:
    """Before: all later operations got the number of the lost one, and were 400 until the service was restarted."""
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        lose_confirmation(service)
        with pytest.raises(Unavailable):
            await step(service, queue, None, 1.0)
        for value in (2.0, 3.0):
            await done(service, await step(service, queue, None, value))
        assert engine.adapters[queue.run.id] == ["seed 7", "step 1.0", "step 2.0", "step 3.0"]


@scenario
async def test_an_operation_runs_once_if_its_lost_confirmation_is_followed_by_a_retry(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        for number in (None, 2):
            lose_confirmation(service)
            with pytest.raises(Unavailable):
                await step(service, queue, number, 1.0)
            await done(service, await step(service, queue, number, 1.0))
        assert engine.adapters[queue.run.id] == ["seed 7", "step 1.0", "step 1.0"]


@scenario
async def test_other_content_under_a_lost_number_is_a_conflict_and_the_lost_operation_runs(tmp_path: Path) -> None:
    """Before: it stayed in the journal alone, and later numbers waited for it until the gap was over."""
    engine = FakeEngine()
    async with running(tmp_path, engine, gap_s=60) as service:
        queue = await new_run(service)
        lose_confirmation(service)
        with pytest.raises(Unavailable):
            await step(service, queue, 1, 1.0)
        with pytest.raises(RequestRejected, match="different content"):
            await step(service, queue, 1, 9.0)
        await done(service, await step(service, queue, 2, 2.0))
        assert engine.adapters[queue.run.id] == ["seed 7", "step 1.0", "step 2.0"]


@scenario
async def test_a_long_run_goes_on_after_a_restart_without_reading_all_its_operations(tmp_path: Path) -> None:
    """Before: all rows were read, on the one thread of the store, and more than 360,000 made the run unloadable."""
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        row = service.intake._row(queue.run, 0, "optim_step", "", state="done")
        rows = [values_of(replace(row, seq_id=n, request_id=f"op-{n}")) for n in range(1, 3000)]
        for start in range(0, len(rows), 100):
            await service.db(service.store._run_write, operations.insert().values(rows[start : start + 100]))
    async with running(tmp_path, FakeEngine()) as service:
        loaded = await service.intake.run_queue("t", queue.run.id)
        assert len(loaded.taken) <= 1001 and 0 in loaded.taken
        assert (loaded.started_up_to, loaded.next_number()) == (2999, 3000)


@scenario
async def test_a_retry_that_the_queue_has_forgotten_is_found_in_the_journal(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        ids = [await step(service, queue, number, float(number)) for number in (1, 2, 3)]
        for request_id in ids:
            await done(service, request_id)
        queue.forget(0)
        assert 1 not in queue.taken
        assert await step(service, queue, 1, 1.0) == ids[0]
        assert (await done(service, ids[0])).error is None
        assert engine.adapters[queue.run.id] == ["seed 7", "step 1.0", "step 2.0", "step 3.0"]


@scenario
async def test_a_sampler_number_used_by_another_model_is_rejected(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        options = {"sampling_session_seq_id": 4}
        await done(service, await service.intake.submit(queue, 1, "save_weights_for_sampler", b"", options=options))
        body = {"session_id": "s", "sampling_session_seq_id": 4, "base_model": "tinkex/tiny"}
        with pytest.raises(RequestRejected) as refused:
            await sampling.create_sampling_session(request(service, body))
        assert refused.value.status == 400
        other = {**body, "sampling_session_seq_id": 5}
        answers = [await sampling.create_sampling_session(request(service, other)) for _ in range(2)]
        assert answers[0].body == answers[1].body, "a retry is answered as before"


@scenario
async def test_operations_wait_for_a_base_model_that_the_restarted_service_does_not_serve(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        engine.gate.clear()
        request_id = await step(service, queue, 1, 1.0)
    other = replace(TINY, name="another/model")
    async with running(tmp_path, FakeEngine(), other) as service:
        pending = service.worker.pending(request_id)
        assert pending is not None
        await asyncio.sleep(0.05)
        state, reason = service.worker.queue_of(pending)
        assert state == "paused_capacity" and "--base-model tinkex/tiny" in reason
        queue = await service.intake.run_queue("t", queue.run.id)
        with pytest.raises(RequestRejected, match="--base-model tinkex/tiny"):
            await step(service, queue, 2, 1.0)
    async with running(tmp_path, FakeEngine()) as service:
        assert (await done(service, request_id)).error is None


@scenario
async def test_a_result_that_the_store_rejects_fails_and_its_adapter_is_rebuilt(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        finish = service.store.finish
        service.store.finish = Mock(side_effect=RuntimeError("a bug"))  # type: ignore[method-assign]
        outcome = await done(service, await step(service, queue, 1, 1.0))
        assert outcome.category == "server" and "could not be stored" in str(outcome.error)
        service.store.finish = finish  # type: ignore[method-assign]
        assert (await done(service, await step(service, queue, 2, 2.0))).error is None
        assert engine.adapters[queue.run.id] == ["seed 7", "step 2.0"]


def test_a_load_goes_on_when_the_database_was_away_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed for good, "The database does not respond", although nothing was wrong with it."""
    monkeypatch.setattr(database, "LOCK_WAIT_S", 0.05)

    @scenario
    async def check(data_dir: Path) -> None:
        engine = FakeEngine()
        async with running(data_dir, engine) as service:
            queue = await new_run(service)
            await done(service, await service.intake.submit(queue, 1, "save_weights", b"", options={"name": "a"}))
            await done(service, await step(service, queue, 2, 2.0))
            engine.gate.clear()
            options = {"path": "tinker://s:train:0/weights/a", "optimizer": False}
            request_id = await service.intake.submit(queue, 3, "load_weights", b"", options=options)
            other = sqlite3.connect(data_dir / "tinkex.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            engine.gate.set()
            while service.worker.pause_reason is None:
                assert service.waiters.recent(request_id) is None, "it failed"
                await asyncio.sleep(0.01)
            other.execute("COMMIT")
            other.close()
            assert (await done(service, request_id)).error is None
            assert engine.adapters[queue.run.id] == ["seed 7"]

    check(tmp_path)
