"""A row of the journal that is damaged fails alone, with the reason; every other operation runs, in its order."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.unit.server.conftest import Served
from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_worker import backward, done, new_run, running, scenario, step
from tinkex.server.service import Service

DAMAGES = {
    "options that are no JSON": "UPDATE operations SET options = '{\"a\": ' WHERE request_id = ?",
    "a missing payload": "DELETE FROM payloads WHERE request_id = ?",
    "another payload": "UPDATE payloads SET content = x'00' WHERE request_id = ?",
    "a payload whose file is gone": "UPDATE payloads SET content = NULL, file = 'ab0123' WHERE request_id = ?",
    "another digest": "UPDATE operations SET digest = 'no' WHERE request_id = ?",
}


def damage(data_dir: Path, statement: str, *values: str) -> None:
    with sqlite3.connect(data_dir / "tinkex.db") as connection:
        assert connection.execute(statement, values).rowcount == 1
    connection.close()


async def queue_three(data_dir: Path) -> list[str]:
    """Three steps of one run and one of another, accepted and not run: the service was stopped before."""
    engine = FakeEngine()
    async with running(data_dir, engine) as service:
        queue, other = await new_run(service), await new_run(service, "other", "bob")
        engine.gate.clear()
        ids = [await step(service, queue, number, number / 10) for number in (1, 2, 3)]
        return [*ids, await step(service, other, 1, 0.9)]


async def outcome(service: Service, request_id: str) -> str | None:
    return (await done(service, request_id)).error


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_queued_operation_fails_alone_and_the_others_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The service used to bind its port and say nothing, for ever."""

    @scenario
    async def check(data_dir: Path) -> None:
        first, second, third, other = await queue_three(data_dir)
        damage(data_dir, DAMAGES[name], second)
        engine = FakeEngine()
        async with running(data_dir, engine) as service:
            assert [await outcome(service, request_id) for request_id in (first, third, other)] == [None] * 3
            error = await outcome(service, second)
            assert error is not None and "operation 2 of s:train:0 is damaged" in error and "new number" in error
            assert engine.adapters["s:train:0"] == ["seed 7", "step 0.1", "step 0.3"]
            row = await service.db(service.store.get_operation, second)
            assert row is not None and row.state == "failed"
        assert f"operation {second}" in caplog.text and "set aside" in caplog.text

    check(tmp_path)


@pytest.mark.parametrize(
    "statement", ["DELETE FROM runs WHERE id = 's:train:0'", "UPDATE runs SET seed = 'many' WHERE id = 's:train:0'"]
)
def test_the_operations_of_a_damaged_run_fail_and_other_runs_go_on(
    statement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @scenario
    async def check(data_dir: Path) -> None:
        *ids, other = await queue_three(data_dir)
        damage(data_dir, statement)
        async with running(data_dir, FakeEngine()) as service:
            assert await outcome(service, other) is None
            for request_id in ids:
                row = await service.db(service.store.get_operation, request_id)
                assert row is not None and row.state == "failed" and "damaged" in (row.error or "")
                assert f"operation {request_id} is set aside" in caplog.text

    check(tmp_path)


@scenario
async def test_a_damaged_operation_is_not_replayed(tmp_path: Path) -> None:
    """Weights that were rebuilt without it, or with other data, would be wrong without a word."""
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        trained = await backward(service, queue, 1)
        await done(service, trained)
    damage(tmp_path, DAMAGES["another payload"].replace("WHERE", "WHERE part = 'command' AND"), trained)
    async with running(tmp_path, FakeEngine()) as service:
        queue = await service.intake.run_queue("t", "s:train:0")
        error = await outcome(service, await step(service, queue, 2, 0.1))
        assert error is not None and "operation 1 of s:train:0 is damaged" in error


@scenario
async def test_weights_whose_checksums_cannot_be_read_are_not_loaded_unchecked(tmp_path: Path) -> None:
    """A damaged list of files was an empty one, so the damaged weights below were loaded without a word."""
    engine = FakeEngine()
    async with running(tmp_path, engine) as service:
        queue = await new_run(service)
        await done(service, await service.intake.submit(queue, 1, "save_weights", b"", options={"name": "a"}))
        path = f"tinker://{queue.run.id}/weights/a"
        damage(tmp_path, "UPDATE checkpoints SET files = '{\"state' WHERE path = ?", path)
        saved = await service.db(service.store.get_checkpoint, path)
        assert saved is not None
        (tmp_path / saved.folder / "state.json").write_text('["damaged"]')
        options = {"path": path, "optimizer": False}
        error = await outcome(service, await service.intake.submit(queue, 2, "load_weights", b"", options=options))
        assert error is not None and f"record of the files of {path} was damaged" in error
        assert engine.adapters[queue.run.id] == ["seed 7"]


def test_a_copy_of_a_checkpoint_with_a_damaged_list_of_files_is_no_empty_checkpoint(served: Served) -> None:
    source = served.checkpoint(served.training_run())
    damage(served.config.data_dir, "UPDATE checkpoints SET files = '{' WHERE path = ?", source.path)
    answer = served.ask("POST", "copy_weights", {"source_path": source.path})
    assert (answer.status, answer.json["code"], answer.json["category"]) == (500, "damaged_checkpoint", "server")
    assert len(served.ask("GET", "checkpoints").json["checkpoints"]) == 1
