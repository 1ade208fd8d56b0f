"""Endpoints for the console: the steps of a run from the journal, the queue, failures; each tenant sees its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select
from sqlalchemy.dialects import sqlite

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_worker import backward, done, new_run, running, scenario, step
from tinkex.engine.frames import Frame
from tinkex.server.app import make_app
from tinkex.server.http.errors import RequestRejected, bad_request
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes import insight
from tinkex.server.service import Service
from tinkex.server.training.steps import settled, steps_of
from tinkex.store.journal import _HAS_FAILED
from tinkex.store.records import OperationRecord
from tinkex.store.store import Store
from tinkex.store.tables import operations


def row(
    seq_id: int, kind: str, metrics: dict[str, float] | None = None, tokens: int = 0, s: float = 0.0
) -> OperationRecord:
    return OperationRecord(
        request_id=f"op-{seq_id}", run_id="r", tenant="t", seq_id=seq_id, kind=kind, digest="", state="done",
        finished_at=float(seq_id), cost_tokens=3 * tokens, tokens=tokens, engine_s=s, metrics=metrics,
    )  # fmt: skip


def test_the_parts_of_one_batch_become_one_step_with_one_loss() -> None:
    rows = [
        row(0, "create_model"),
        row(1, "forward_backward", {"loss:sum": 30.0, "weight:sum": 10.0}, 12, 0.5),
        row(2, "forward_backward", {"loss:sum": 10.0, "weight:sum": 30.0}, 40, 1.0),
        row(3, "optim_step", {"grad_norm:sum": 2.0, "learning_rate": 1e-4}, 0, 0.25),
        row(4, "save_weights"),
        row(5, "forward", {"loss:sum": 6.0, "weight:sum": 3.0}, 5),
        row(6, "forward_backward", {"loss:sum": 7.0}),
        row(7, "optim_step", {"learning_rate": 2e-4}),
        row(8, "forward_backward", {"loss:sum": 1.0, "weight:sum": 1.0}),
    ]
    (first, second), open_passes = steps_of(rows)
    assert open_passes == 1
    assert (first["loss"], first["tokens"], first["seconds"], first["learning_rate"]) == (1.0, 52, 1.75, 1e-4)
    assert (first["seq_id"], first["evaluation_loss"], first["metrics"]["grad_norm:sum"]) == (3, None, 2.0)
    assert (second["loss"], second["evaluation_loss"], second["learning_rate"]) == (7.0, 2.0, 2e-4)


def test_passes_without_an_optimizer_step_are_reported_when_the_list_is_cut() -> None:
    rows = [row(number, "forward_backward", {"loss:sum": 1.0, "weight:sum": 2.0}) for number in range(1, 4)]
    assert steps_of(rows) == ([], 3)
    steps, open_passes = steps_of(rows, is_cut=True)
    assert [(entry["seq_id"], entry["loss"]) for entry in steps] == [(3, 0.5)] and open_passes == 0


def test_no_mean_loss_is_reported_for_gradients_sent_as_weights() -> None:
    rows = [
        row(1, "forward", {"loss:sum": 0.0, "weight:sum": 0.0}),
        row(2, "forward_backward", {"loss:sum": 3.0, "weight:sum": -1e-7}),
        row(3, "optim_step"),
    ]
    (step,), _ = steps_of(rows)
    assert (step["loss"], step["evaluation_loss"]) == (None, None)


async def ask(service: Service, name: str, tenant: str, query: str = "", **parts: str) -> dict[str, Any]:
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": query.encode(), "headers": []}
    request = ApiRequest({**scope, "app": make_app(service), "state": {"tenant": tenant}, "path_params": parts})
    answer: dict[str, Any] = orjson.loads((await getattr(insight, name)(request)).body)
    return answer


@scenario
async def test_a_run_tells_its_steps_and_goes_on_after_the_last_one_that_was_told(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        for number in (1, 3):
            await backward(service, queue, number)
            await done(service, await step(service, queue, number + 1, 0.5))
        told = await ask(service, "run_steps", "t", run_id=queue.run.id)
        assert [entry["seq_id"] for entry in told["steps"]] == [2, 4]
        assert told["steps"][0]["learning_rate"] == 0.5
        again = await ask(service, "run_steps", "t", "after_seq_id=2", run_id=queue.run.id)
        assert [entry["seq_id"] for entry in again["steps"]] == [4] and again["next_seq_id"] == 4
        assert (await ask(service, "run_steps", "t", f"after_seq_id={10**30}", run_id=queue.run.id))["steps"] == []
        with pytest.raises(RequestRejected, match="not known"):
            await ask(service, "run_steps", "stranger", run_id=queue.run.id)


@scenario
async def test_the_state_tells_ones_own_queue_and_of_others_a_number(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue, other = await new_run(service), await new_run(service, "o", "stranger")
        engine.gate.clear()
        for each in (queue, other):
            await step(service, each, 1, 0.5)
            await step(service, each, 2, 0.5)
        await asyncio.sleep(0.02)
        state = await ask(service, "service_state", "t")
        assert {entry["run_id"] for entry in state["queue"]} == {queue.run.id}
        assert (state["queued_operations"], state["queued_operations_of_others"]) == (2, 2)
        assert "1 operation of this run before it" in state["queue"][1]["reason"]
        assert "stranger" not in orjson.dumps(state).decode()
        engine.gate.set()


@scenario
async def test_looking_at_an_old_run_reads_no_journal_into_memory(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        await done(service, await step(service, queue, 1, 0.5))
    async with running(tmp_path, FakeEngine()) as service:
        told = await ask(service, "run_steps", "t", run_id=queue.run.id)
        assert len(told["steps"]) == 1 and told["is_active"] is False
        assert not service.worker._queues


def test_the_failures_of_a_tenant_are_found_by_their_index(tmp_path: Path) -> None:
    """SQLite uses a partial index only if the states stand in the statement: as parameters it read every row."""
    wanted = select(operations).where(operations.c.tenant == "t", _HAS_FAILED)
    text = str(wanted.compile(dialect=sqlite.dialect(), compile_kwargs={"render_postcompile": True}))
    assert "IN ('failed', 'refused')" in text
    with Store.open(f"sqlite:///{tmp_path}/tinkex.db", tmp_path) as store, store._read() as connection:
        plan = connection.exec_driver_sql("EXPLAIN QUERY PLAN " + text, ("t",)).all()
    assert "USING INDEX operations_failed" in str(plan)


@scenario
async def test_failures_are_told_with_their_reason_to_their_tenant_alone(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        await service.intake.reject(queue, 1, "forward_backward", bad_request("datum 0 is empty", "bad_datum"))
        command = Frame({"op": "unheard_of", "adapter": queue.run.id}).encode()
        await done(service, await service.intake.submit(queue, 2, "unheard_of", command))
        told = await ask(service, "failed_operations", "t")
        assert [(entry["seq_id"], entry["state"]) for entry in told["operations"]] == [(2, "failed"), (1, "refused")]
        assert told["operations"][1]["error"] == "datum 0 is empty" and told["cursor"]["total_count"] == 2
        assert (await ask(service, "failed_operations", "stranger"))["operations"] == []


@scenario
async def test_a_thinned_history_ends_with_the_last_step_and_counts_those_between(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        for number in range(1, 21, 2):
            await backward(service, queue, number)
            await done(service, await step(service, queue, number + 1, 0.5))
        told = await ask(service, "run_steps", "t", "most_steps=4", run_id=queue.run.id)
        assert [entry["seq_id"] for entry in told["steps"]] == [2, 8, 14, 20]
        assert [entry["number"] for entry in told["steps"]] == [1, 4, 7, 10]
        assert (told["count"], told["next_seq_id"], told["is_thinned"]) == (10, 20, True)
        whole = await ask(service, "run_steps", "t", "most_steps=10", run_id=queue.run.id)
        spent = sum(entry["seconds"] for entry in whole["steps"])
        assert len(whole["steps"]) == 10 and told["steps"][-1]["seconds_so_far"] == pytest.approx(spent)
        part = await ask(service, "run_steps", "t", "after_seq_id=8&before_seq_id=15", run_id=queue.run.id)
        assert [entry["seq_id"] for entry in part["steps"]] == [10, 12, 14]
        short = await ask(service, "run_steps", "t", "most_steps=4&only=loss", run_id=queue.run.id)
        assert [set(entry) for entry in short["steps"]] == [{"seq_id", "loss"}] * 4


@scenario
async def test_the_failures_of_one_run_can_be_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as service:
        queue = await new_run(service)
        await service.intake.reject(queue, 1, "forward_backward", bad_request("datum 0 is empty", "bad_datum"))
        own = await ask(service, "failed_operations", "t", f"run_id={queue.run.id}")
        assert own["cursor"]["total_count"] == 1
        assert (await ask(service, "failed_operations", "t", "run_id=another"))["cursor"]["total_count"] == 0


def failed(seq_id: int, kind: str, error: str, state: str = "failed") -> OperationRecord:
    return replace(row(seq_id, kind, tokens=100), state=state, error=error)  # type: ignore[arg-type]


def test_a_failed_operation_is_a_failure_of_its_step_with_the_reason() -> None:
    rows = [
        row(1, "forward_backward", {"loss:sum": 3.0}, 10),
        failed(2, "optim_step", "learning_rate is too large", "refused"),
        failed(3, "forward_backward", "no memory"),
        failed(4, "forward_backward", "still none"),
        row(5, "optim_step", {"learning_rate": 1e-4}),
    ]
    (first, second), _ = steps_of(rows)
    assert (first["failed"], first["failure"]) == (1, "optim_step: learning_rate is too large")
    assert (first["loss"], first["tokens"]) == (3.0, 10)
    assert (second["failed"], second["failure"], second["loss"]) == (2, "forward_backward: no memory", None)
    assert second["tokens"] == 0, "what failed has trained no tokens"


def test_a_rejected_operation_that_came_before_its_turn_waits_for_those_in_front_of_it() -> None:
    rows = [
        row(1, "forward_backward"),
        failed(2, "optim_step", "no", "refused"),
        failed(5, "optim_step", "no", "refused"),
    ]
    assert [entry.seq_id for entry in settled(rows, 0)] == [1, 2]
    assert [entry.seq_id for entry in settled([*rows, row(6, "forward_backward")], 0)] == [1, 2, 5, 6]
    assert [entry.seq_id for entry in settled(rows[1:], 1)] == [2]


def test_a_step_waited_only_while_nothing_of_its_run_was_in_the_engine() -> None:
    def at(seq_id: int, kind: str, created: float, finished: float, engine_s: float) -> OperationRecord:
        return replace(row(seq_id, kind, s=engine_s), created_at=created, finished_at=finished)

    rows = [
        at(1, "forward_backward", 10.0, 14.0, 3.0),  # waited a second
        at(2, "optim_step", 10.0, 14.5, 0.5),  # waited for the pass, and for nothing else
        at(3, "forward_backward", 20.0, 25.0, 1.0),
        at(4, "optim_step", 30.0, 31.0, 1.0),
    ]
    whole, _ = steps_of(rows)
    assert [(entry["seconds"], entry["queue_seconds"]) for entry in whole] == [(3.5, 1.0), (2.0, 4.0)]
    early = replace(rows[2], created_at=10.0)
    assert steps_of([early, rows[3]], before=rows[1])[0][0]["queue_seconds"] == pytest.approx(9.5)
