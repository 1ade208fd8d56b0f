"""Lists read the rows they show and no others, with a number of statements that does not grow with the list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from tests.unit.store.conftest import Place, checkpoint, operation, run
from tinkex.store.database import values_of
from tinkex.store.store import Store
from tinkex.store.tables import checkpoints, operations, runs

RUNS = 1000


@contextmanager
def statements(store: Store) -> Iterator[list[tuple[str, Any]]]:
    """Every statement that the store sends, with its values."""
    sent: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, values: Any, *_rest: Any) -> None:
        sent.append((statement, values))

    event.listen(store._engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(store._engine, "before_cursor_execute", note)


def plan(store: Store, statement: str, values: Any) -> str:
    with store._read() as connection:
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
    return "\n".join(str(row.detail) for row in rows)


def filled(place: Place) -> Store:
    store = place.open()
    with store._write() as connection:
        connection.execute(runs.insert(), [values_of(run(f"s:train:{n}", created_at=float(n))) for n in range(RUNS)])
        saved = [checkpoint(f"c{k}", run_id=f"s:train:{n}", created_at=float(k)) for n in range(RUNS) for k in range(2)]
        connection.execute(checkpoints.insert(), [values_of(row) for row in saved])
    return store


def test_the_newest_checkpoints_of_a_thousand_runs_take_one_statement(place: Place) -> None:
    store = filled(place)
    with statements(store) as sent:
        newest = store.newest_checkpoints([f"s:train:{n}" for n in range(RUNS)], now=50.0)
    assert len([statement for statement, _ in sent if "checkpoints" in statement]) == 1
    assert sorted(row.path for row in newest) == sorted(f"tinker://s:train:{n}/weights/c1" for n in range(RUNS))


def test_expired_checkpoints_are_not_the_newest_and_each_kind_has_its_own(store: Store) -> None:
    for name, kind, expires_at in (("a", "weights", None), ("b", "weights", 50.0), ("c", "sampler_weights", None)):
        store.add_checkpoint(checkpoint(name, kind=kind, created_at=float(ord(name)), expires_at=expires_at))
    assert {row.name for row in store.newest_checkpoints(["s:train:0"], now=50.0)} == {"a", "c"}
    assert {row.name for row in store.newest_checkpoints(["s:train:0"], now=49.0)} == {"b", "c"}
    assert store.newest_checkpoints([], now=50.0) == []
    assert store.session_usage("s", 50.0) == (0, 0), "the run is not known"


def test_the_checkpoints_of_one_run_are_found_by_the_index_of_runs(sqlite_place: Place) -> None:
    """The tenant's index was read from end to end for each run: 8.6 s for a list of 1000 runs among 4000."""
    store = filled(sqlite_place)
    with statements(store) as sent:
        store.list_checkpoints("ann", "s:train:7", 0, 10, now=50.0)
        store.newest_checkpoints(["s:train:7", "s:train:8"], now=50.0)
        assert store.session_usage("s", 50.0) == (2 * RUNS, 200 * RUNS)
    plans = [plan(store, *statement) for statement in sent if "FROM checkpoints" in statement[0]]
    assert len(plans) == 4  # a page and its count, the newest, the usage
    for text in plans:
        assert "checkpoints_by_run" in text and "checkpoints_by_tenant" not in text, text
        assert "SCAN checkpoints" not in text, text
    assert "TEMP B-TREE" not in plans[0], "the page comes out of the index in order"


def long_run(place: Place, states: Mapping[int, str] = {}) -> Store:
    """A run whose operations are done, except those of these numbers."""
    store = place.open()
    rows = [operation(n, state=states.get(n, "done")) for n in range(5000)]
    with store._write() as connection:
        connection.execute(runs.insert(), values_of(run()))
        connection.execute(operations.insert(), [values_of(row) for row in rows])
    return store


def test_a_long_run_is_loaded_without_reading_all_its_operations(place: Place) -> None:
    """Before: every row was read; after 360,000 operations that took longer than a call may, so the run was lost."""
    store = long_run(place, {7: "queued", 4990: "refused", 4998: "queued", 4999: "refused"})
    numbers = [row.seq_id for row in store.recent_operations("s:train:0", 100)]
    assert numbers == [0, 7, *range(4900, 5000)]
    assert [row.state for row in store.recent_operations("s:train:0", 1)] == [
        "done",
        "queued",
        "done",
        "queued",
        "refused",
    ]


def test_what_waits_behind_the_last_operation_that_ended_is_loaded_whole(place: Place) -> None:
    waiting = {n: "refused" if n == 4700 else "queued" for n in range(4700, 5000)}
    store = long_run(place, waiting)
    assert [row.seq_id for row in store.recent_operations("s:train:0", 100)] == [0, *range(4699, 5000)]


def test_the_recent_operations_of_a_run_are_found_by_indexes(sqlite_place: Place) -> None:
    store = long_run(sqlite_place)
    with statements(store) as sent:
        store.recent_operations("s:train:0", 100)
    plans = [plan(store, *statement) for statement in sent if "FROM operations" in statement[0]]
    assert len(plans) == 4
    for text in plans:
        assert "SCAN" not in text and "TEMP B-TREE" not in text, text
    assert "COVERING INDEX" in plans[0] and "operations_queued" in plans[3], plans
    assert "seq_id>?" in plans[2], "only rows from there on are read"
