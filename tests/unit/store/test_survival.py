"""Acknowledged writes survive kill -9, lost connections and other programs; and a write is quick."""

from __future__ import annotations

import random
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests.unit.store.conftest import LARGE, Place, operation, run
from tests.unit.store.postgres import PostgresServer
from tinkex.store import database
from tinkex.store.errors import Unavailable
from tinkex.store.store import Store

WRITER = """
import sys
from pathlib import Path
from tests.unit.store.conftest import LARGE, operation
from tinkex.store.store import Store

store = Store.open(sys.argv[1], Path(sys.argv[2]))
for seq_id in range(store.last_seq("s:train:0") + 1, 1_000_000):
    store.add_operation(operation(seq_id), LARGE if seq_id % 5 == 0 else b"%d" % seq_id)
    print("added", seq_id, flush=True)
    store.finish(f"s:train:0/{seq_id}", at=1.0, result=b"r%d" % seq_id, result_type="json")
    print("finished", seq_id, flush=True)
"""
ROOT = Path(__file__).parents[3]


def write_until_killed(place: Place, lines: int) -> list[tuple[str, int]]:
    """What a process acknowledged before it was killed in the middle of its work."""
    command = [sys.executable, "-c", WRITER, place.url, str(place.data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        said += process.stdout.readlines()
    return [(word, int(number)) for word, number in (line.split() for line in said if line.endswith("\n"))]


@pytest.mark.slow
def test_no_acknowledged_row_is_lost_to_kill_9(place: Place) -> None:
    place.open().add_run(run(), operation(0), b"create")
    place.opened.pop().close()
    for seed in range(3 if place.kind == "sqlite" else 2):
        acknowledged = write_until_killed(place, random.Random(seed).randint(1, 120))
        store = place.open()
        for word, seq_id in acknowledged:
            assert store.command(f"s:train:0/{seq_id}") == (LARGE if seq_id % 5 == 0 else b"%d" % seq_id)
            if word == "finished":
                assert store.result(f"s:train:0/{seq_id}") == b"r%d" % seq_id
        waiting = [found.seq_id for found in store.queued() if found.seq_id]
        assert len(waiting) <= seed + 1, "at most the one in hand at each death"
        numbers = [found.seq_id for found in store.operations_of("s:train:0")]
        assert numbers == list(range(len(numbers)))
        store.sweep()
        assert len(place.files()) == sum(number % 5 == 0 for number in numbers if number)
        store.close()
    if place.kind == "sqlite":
        with sqlite3.connect(place.data_dir / "tinkex.db") as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_lost_connection_is_replaced_before_the_next_call(postgres_place: Place, postgres: PostgresServer) -> None:
    store = postgres_place.open()
    store.add_run(run(), operation(0), b"create")
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        ended = connection.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'tinkex'"
        ).fetchone()
    assert ended is not None and ended[0] >= 1
    store.add_operation(operation(1), b"after")
    assert store.command("s:train:0/1") == b"after"


def test_a_lost_connection_is_reported_and_leaves_the_payload_to_the_sweep(
    postgres_place: Place, postgres: PostgresServer
) -> None:
    store = postgres_place.open()
    with pytest.raises(Unavailable, match=r"does not respond"), store._write_with_payload(LARGE) as (connection, _kept):
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        with psycopg.connect(postgres.url(), autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        connection.exec_driver_sql("SELECT 1")
    assert len(postgres_place.files()) == 1, "the commit might have stood"
    assert store.sweep() == 1


def test_another_program_may_write_the_same_database_between_our_calls(place: Place) -> None:
    ours, theirs = place.open(), place.open()
    ours.add_run(run(), operation(0), b"create")
    for seq_id in range(1, 21):
        (ours if seq_id % 2 else theirs).add_operation(operation(seq_id), b"")
    assert ours.last_seq("s:train:0") == theirs.last_seq("s:train:0") == 20


def test_a_second_opening_in_one_process_lets_no_other_process_damage_the_database(sqlite_place: Place) -> None:
    """Closing any descriptor of a file drops all locks of the process on it. `tinkex serve` opens its store twice."""
    store = sqlite_place.open()
    store.add_run(run(), operation(0), b"create")
    with Store.open(sqlite_place.url, sqlite_place.data_dir):
        pass
    writes = """import sys; from pathlib import Path; from tinkex.store.store import Store
with Store.open(sys.argv[1], Path(sys.argv[2])) as store:
    store.get_run("s:train:0")"""
    subprocess.run([sys.executable, "-c", writes, sqlite_place.url, str(sqlite_place.data_dir)], check=True, cwd=ROOT)
    log = Path(f"{sqlite_place.url.removeprefix('sqlite:///')}-wal")
    assert log.exists(), "another process took itself for the only one, and deleted the log that this one writes"
    store.add_operation(operation(1), b"1")


@pytest.mark.slow
def test_a_locked_sqlite_file_is_reported_and_the_call_can_be_retried(
    sqlite_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCK_WAIT_S", 0.05)
    store = sqlite_place.open()
    other = sqlite3.connect(sqlite_place.data_dir / "tinkex.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match=r"Another program has locked the database"):
        store.add_run(run(), operation(0), LARGE)
    assert store.get_run("s:train:0") is None, "reading goes on meanwhile"
    other.execute("COMMIT")
    other.close()
    store.add_run(run(), operation(0), LARGE)
    assert store.command("s:train:0/0") == LARGE


@pytest.mark.timing
def test_storing_a_small_operation_is_cheap(sqlite_place: Place) -> None:
    store: Store = sqlite_place.open()
    store.add_run(run(), operation(0), b"create")
    taken = []
    for seq_id in range(1, 201):
        start = time.perf_counter()
        store.add_operation(operation(seq_id), b"x" * 300)
        store.finish(f"s:train:0/{seq_id}", at=1.0, result=b"y" * 300, result_type="json")
        taken.append(time.perf_counter() - start)
    assert statistics.median(taken) < 0.004
