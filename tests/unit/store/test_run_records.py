"""Lists and searches of runs, how a run is found, its status, and how it is deleted: on SQLite and on PostgreSQL."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sqlalchemy import text

from tests.unit.store.conftest import Add, Place, checkpoint, operation, run, sampler, session
from tests.unit.store.test_query_plans import plan, statements
from tinkex.store.database import values_of
from tinkex.store.errors import RunDeleted
from tinkex.store.journal import EndedStep
from tinkex.store.records import AuditEntry, OperationRecord
from tinkex.store.run_records import RUNNING_S, RunFilter
from tinkex.store.store import Store
from tinkex.store.tables import operations, runs, schema_version

NOW = 1000.0
ENTRY = AuditEntry(id="entry", at=NOW, tenant="ann", action="run.delete", target="s:train:0")


def add_run(store: Store, run_id: str, **values: Any) -> None:
    store.add_run(run(run_id, **values), operation(0, run_id, kind="create_model"), b"")
    store.finish(f"{run_id}/0", at=values.get("created_at", 1.0), result=b"{}", result_type="json")


@pytest.fixture
def three(store: Store) -> Store:
    """Runs 0 to 2, the last one the newest."""
    add_run(store, "1a2b3c:train:0", name="Größe A", tags=["RL", "keep"], created_at=1.0, last_request_at=9.0)
    add_run(store, "1a2b3c:train:1", name="second", created_at=2.0, base_model="org/other", steps=5, loss=0.5)
    add_run(store, "9f8e7d:train:2", name="second", created_at=3.0, steps=2, loss=0.25, archived_at=5.0)
    add_run(store, "bob:train:0", tenant="bob", name="second", created_at=4.0)
    return store


def numbers(store: Store, **which: Any) -> str:
    listed, total = store.list_runs("ann", 0, 10, RunFilter(**which), NOW)
    assert total == len(listed)
    return "".join(row.run.id[-1] for row in listed)


def test_runs_are_searched_by_the_words_of_name_id_model_and_tags_in_any_case(three: Store) -> None:
    searches = ("größe", "GRÖßE", "SECOND", "other 1A2B", "keep größe", "9f8e", "größe second")
    assert [numbers(three, words=words) for words in searches] == ["0", "0", "1", "1", "0", "", ""]
    assert numbers(three, words="\0") == numbers(three, words="\ud800") == numbers(three, tag="\0\ud800") == ""
    assert numbers(three, words="%") == numbers(three, words="_") == numbers(three, words="bob") == ""


def test_runs_are_filtered_by_tag_model_and_archive(three: Store) -> None:
    assert (numbers(three, tag="rl"), numbers(three, tag="R"), numbers(three, tag='"')) == ("0", "", "")
    assert (numbers(three, base_model="org/other"), numbers(three, base_model="org")) == ("1", "")
    assert [numbers(three, archived=archived) for archived in ("no", "only", "all")] == ["10", "2", "210"]


def test_runs_are_sorted_and_what_a_run_does_not_have_comes_last(three: Store) -> None:
    def by(order: str) -> tuple[str, str]:
        return tuple(numbers(three, archived="all", order=order, is_reversed=back) for back in (False, True))  # type: ignore[return-value]

    assert by("created") == ("210", "012")
    assert by("loss") == ("210", "120")
    assert by("steps") == ("120", "021")
    assert by("name") == ("021", "210")
    assert by("last_request") == ("021", "210")


def test_a_run_is_found_by_id_name_beginning_number_and_latest(three: Store) -> None:
    def find(text: str, tenant: str = "ann") -> list[str]:
        return [found.id for found in three.find_runs(tenant, text)]

    assert find("1a2b3c:train:0") == ["1a2b3c:train:0"]
    assert find("second") == ["9f8e7d:train:2"], "the newest of that name, archived or not"
    assert find("9f8e") == ["9f8e7d:train:2"] and find("9f8") == []
    assert find("1a2b") == ["1a2b3c:train:1", "1a2b3c:train:0"]
    assert find("1a2b:0") == ["1a2b3c:train:0"] and find("1a2b:2") == []
    assert find("latest") == ["1a2b3c:train:0"] and find("latest", "carl") == []
    assert find("1A2B") == find("%%%%") == find("bob:train:0") == find("") == find("\0\ud800\0a") == []
    assert find("second", "bob") == ["bob:train:0"]


def test_latest_is_an_archived_run_only_if_there_is_no_other(three: Store) -> None:
    for number in (0, 1):
        three.update_run(f"1a2b3c:train:{number}", {"archived_at": 1.0})
    three.update_run("9f8e7d:train:2", {"archived_at": None})
    assert [found.id for found in three.find_runs("ann", "latest")] == ["9f8e7d:train:2"]
    three.update_run("9f8e7d:train:2", {"archived_at": 1.0})
    assert [found.id for found in three.find_runs("ann", "latest")] == ["1a2b3c:train:0"]


FINISHED = {
    "open": None,
    "ended": {"reason": {"type": "success"}, "detail": '{"type":"errored"}'},
    "broken": {"reason": {"type": "errored"}},
}


def test_the_status_of_a_run_follows_the_four_rules(place: Place) -> None:
    """All combinations: what its last operation is, when that ended, the session, unloaded or not."""
    store, expected = place.open(), {}
    for finished, last, is_recent, is_unloaded in itertools.product(
        FINISHED, ("queued", "done", "failed"), (True, False), (True, False)
    ):
        name = f"{finished}-{last}-{is_recent}-{is_unloaded}"
        run_id, at = f"{name}:train:0", NOW - (RUNNING_S if is_recent else RUNNING_S + 1)
        store.add_session(session(name, finished=FINISHED[finished]))
        add_run(store, run_id, is_unloaded=is_unloaded)
        store.add_operation(operation(1, run_id), b"")
        store.fail(f"{run_id}/1", at=1.0, error="early", category="user")  # others came after it
        store.add_operation(operation(2, run_id), b"")
        if last == "done":
            store.finish(f"{run_id}/2", at=at, result=b"{}", result_type="json")
        elif last == "failed":
            store.fail(f"{run_id}/2", at=at, error="late", category="user")
        is_running = last == "queued" or is_recent
        is_failed = last == "failed" or finished == "broken"
        is_over = finished == "ended" or is_unloaded
        expected[run_id] = "running" if is_running else "failed" if is_failed else "finished" if is_over else "idle"
    listed, _ = store.list_runs("ann", 0, 100, RunFilter(), NOW)
    assert {row.run.id: row.status for row in listed} == expected
    assert set(expected.values()) == {"running", "failed", "finished", "idle"}
    for status in set(expected.values()):
        found, total = store.list_runs("ann", 0, 100, RunFilter(status=status), NOW)  # type: ignore[arg-type]
        assert {row.run.id for row in found} == {run_id for run_id, known in expected.items() if known == status}
        assert total == len(found)


def sum_of_losses(rows: Any) -> float | None:
    losses = [row.metrics["loss:sum"] for row in rows if row.kind == "forward_backward" and row.metrics]
    return sum(losses) if losses else None


def test_a_step_is_counted_with_the_loss_of_its_own_passes(started: Store, add: Add) -> None:
    def end(row: OperationRecord, **metrics: float) -> tuple[int, float | None]:
        step = EndedStep(row.run_id, row.seq_id, sum_of_losses) if row.kind == "optim_step" else None
        given = {"loss:sum": metrics["loss"]} if metrics else None
        started.finish(row.request_id, at=20.0, result=b"{}", result_type="json", metrics=given, step=step)
        found = started.get_run(row.run_id)
        assert found is not None
        return found.steps, found.loss

    assert end(add(1, kind="forward_backward"), loss=8.0) == (0, None)
    assert end(add(2)) == (1, 8.0)
    end(add(3, kind="forward_backward"), loss=1.0)
    end(add(4, kind="forward_backward"), loss=2.0)
    assert end(add(5)) == (2, 3.0)
    assert end(add(6)) == (3, 3.0), "a step without passes keeps the last loss"
    started.fail(add(7).request_id, at=20.0, error="bad rate", category="user")
    with pytest.raises(KeyError):
        end(operation(6))
    found = started.get_run("s:train:0")
    assert found is not None and (found.steps, found.loss) == (3, 3.0), "a step counts once"
    end(add(8, kind="forward_backward"), loss=10.0)
    started.fail(add(9).request_id, at=20.0, error="bad rate", category="user")
    end(add(10, kind="forward_backward"), loss=1.0)
    assert end(add(11)) == (4, 1.0), "a step that failed is over, as in the curve"


def test_a_deleted_run_leaves_nothing_behind_and_others_alone(started: Store, add: Add) -> None:
    add_run(started, "t:train:0")
    for run_id in ("s:train:0", "t:train:0"):
        for kind in ("weights", "sampler_weights"):
            started.add_checkpoint(checkpoint(kind, run_id=run_id, kind=kind, folder=f"checkpoints/{run_id}/{kind}/a"))
        started.add_sampler(sampler(f"{run_id}-of", model_path=f"tinker://{run_id}/sampler_weights/a"))
        started.add_sampler(sampler(f"{run_id}-ephemeral", folder=f"checkpoints/{run_id}/ephemeral/7"))
    started.set_snapshot("s:train:0", "journal/snapshots/s", 0)
    add(1, bytes(200_000))
    kept = started.dependents_of("s:train:0")
    assert started.get_run("s:train:0") is not None
    deleted = started.delete_run("s:train:0", ENTRY)
    assert deleted == kept and deleted.operations == 2
    assert [saved.kind for saved in deleted.checkpoints] == ["sampler_weights", "weights"]
    assert {row.id for row in deleted.samplers} == {"s:train:0-of", "s:train:0-ephemeral"}
    assert deleted.folders == [
        "checkpoints/s:train:0/ephemeral/7", "checkpoints/s:train:0/sampler_weights/a",
        "checkpoints/s:train:0/weights/a", "journal/snapshots/s",
    ]  # fmt: skip
    assert (started.get_run("s:train:0"), started.operations_of("s:train:0")) == (None, [])
    assert started.payload("s:train:0/1", "command") is None
    assert started.all_folders() == {folder.replace("s:", "t:") for folder in deleted.folders[:3]}
    assert started.get_sampler("t:train:0-of") is not None and len(started.operations_of("t:train:0")) == 1
    assert [entry.action for entry in started.list_audit("ann", limit=5)] == ["run.delete"]


def test_the_oldest_operations_are_deleted_first_and_none_that_waits(started: Store, add: Add) -> None:
    for seq_id in (1, 2, 3):
        add(seq_id, bytes(200_000))
    for seq_id in (1, 2):
        started.finish(f"s:train:0/{seq_id}", at=20.0, result=bytes(200_000), result_type="json")
    assert started.delete_ended_operations("s:train:0", 2) == 2
    assert [row.seq_id for row in started.operations_of("s:train:0")] == [2, 3]
    assert (started.payload("s:train:0/1", "command"), started.payload("s:train:0/1", "result")) == (None, None)
    assert [started.delete_ended_operations("s:train:0", 2) for _ in range(2)] == [1, 0]
    assert [row.state for row in started.operations_of("s:train:0")] == ["queued"]


def test_an_operation_that_arrives_while_its_run_is_deleted_leaves_no_row(started: Store) -> None:
    started.delete_run("s:train:0", ENTRY)
    with pytest.raises(RunDeleted, match=r"s:train:0.* is not known"):
        started.add_operation(operation(1), b"late")
    with pytest.raises(RunDeleted):
        started.add_rejected(operation(1, state="refused"), [])
    assert started.operations_of("s:train:0") == [] and started.queued() == []


def test_runs_of_version_7_get_names_tags_steps_and_losses(place: Place) -> None:
    store = place.open()
    store.add_session(session("s", display_name="the session"))
    add_run(store, "s:train:0", user_metadata={"name": "mine", "tags": "a, b"})
    add_run(store, "s:train:1", user_metadata={"run_name": "\tother"})
    add_run(store, "s:train:2")
    kinds = ("forward_backward", "optim_step", "forward_backward", "forward_backward", "optim_step", "forward_backward")
    for seq_id, kind in enumerate(kinds, 1):
        row = operation(seq_id, kind=kind)
        store.add_operation(row, b"")
        metrics = {"loss:sum": float(seq_id), "weight:sum": 2.0} if kind == "forward_backward" else {}
        store.finish(row.request_id, at=20.0, result=b"{}", result_type="json", metrics=metrics)
    with store._write() as connection:
        for index in ("runs_by_name", "runs_by_archive"):
            connection.execute(text(f"DROP INDEX {index}"))
        for column in ("name", "tags", "archived_at", "steps", "loss"):
            connection.execute(text(f"ALTER TABLE runs DROP COLUMN {column}"))
        connection.execute(schema_version.update().values(version=7))
    store.close()
    found = [place.open().get_run(f"s:train:{number}") for number in range(3)]
    assert [(row.name, row.tags, row.steps, row.loss) for row in found if row is not None] == [
        ("mine", ["a", "b"], 2, 1.75), ("other", [], 0, None), ("the session", [], 0, None),
    ]  # fmt: skip


def test_a_list_of_a_thousand_runs_with_long_journals_takes_three_statements(place: Place) -> None:
    """And none of them reads an operation but the last of each run that is shown."""
    store = place.open()
    with store._write() as connection:
        rows = [values_of(run(f"s{n}:train:0", name=f"run {n}", created_at=float(n))) for n in range(1000)]
        connection.execute(runs.insert(), rows)
        ended = [
            operation(seq_id, f"s{n}:train:0", state="done", finished_at=1.0)
            for n in range(1000)
            for seq_id in range(5)
        ]
        connection.execute(operations.insert(), [values_of(row) for row in ended])
    with statements(store) as sent:
        listed, total = store.list_runs("ann", 0, 1000, RunFilter(), NOW)
        assert len(store.find_runs("ann", "run 7")) == 1
    assert len(listed) == total == 1000 and len(sent) == 5
    if place.kind == "sqlite":
        page, _, described, _, named = (plan(store, *statement) for statement in sent)
        assert "INDEX runs_by_archive (tenant=? AND archived_at=?)" in page and "TEMP B-TREE" not in page
        assert described.count("SEARCH operations USING INDEX sqlite_autoindex_operations_2 (run_id=?)") == 2
        assert "TEMP B-TREE" not in described and "SCAN runs" not in described
        assert "INDEX runs_by_name (tenant=? AND name=?)" in named and "TEMP B-TREE" not in named
