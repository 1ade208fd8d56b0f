"""One server writes a store: a second is rejected with the address of the first; one that lost it writes nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection, select

from tests.unit.store.conftest import LARGE, Place, checkpoint, operation, run
from tinkex.clock import REAL
from tinkex.errors import ConfigError
from tinkex.store import lease as leases
from tinkex.store import migrations
from tinkex.store.errors import LeaseLost
from tinkex.store.lease import Lease
from tinkex.store.store import Store
from tinkex.store.tables import metadata, schema_version

ADDRESS = "http://10.0.0.1:8000"
HOLD = """
import sys
from pathlib import Path
from tinkex.store.store import Store

store = Store.open(sys.argv[1], Path(sys.argv[2]))
with store.lease(sys.argv[3], Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(place: Place, data_dir: Path) -> subprocess.Popen[str]:
    """Another process that has the lease, with a data folder of its own."""
    data_dir.mkdir(exist_ok=True)
    words = [sys.executable, "-c", HOLD, place.url, str(data_dir), ADDRESS]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def own(place: Place, store: Store | None = None) -> AbstractContextManager[Lease]:
    return (store or place.open()).lease("http://10.0.0.2:8000", place.data_dir)


def test_a_second_server_with_its_own_folder_is_rejected_with_the_address_of_the_first(
    place: Place, tmp_path: Path
) -> None:
    """It used to start, and both trained the same run without each other's steps."""
    with holder(place, tmp_path / "first") as first:
        with pytest.raises(ConfigError, match=rf"{ADDRESS}, writes.*{tmp_path / 'first'}.*stop it.*--database-url"):
            own(place).__enter__()
        first.kill()


def test_a_server_that_was_killed_is_replaced_at_once(place: Place, tmp_path: Path) -> None:
    with holder(place, tmp_path / "first") as first:
        first.kill()
        first.wait()
    with own(place) as lease:
        assert not lease.is_lost
    with own(place):
        pass  # and after an orderly end


def test_programs_beside_a_server_may_write(place: Place) -> None:
    server, beside = place.open(), place.open()
    with own(place, server):
        beside.add_run(run(), operation(0), b"create")
        server.finish("s:train:0/0", at=1.0, result=b"{}", result_type="json")


def until(place: Place) -> float:
    with psycopg.connect(place.url) as connection:
        row = connection.execute("SELECT until FROM lease").fetchone()
    assert row is not None
    return float(row[0])


WRITES: dict[str, Callable[[Store], object]] = {
    "finish": lambda store: store.finish("s:train:0/1", at=1.0, result=b"x" * 100_000, result_type="json"),
    "fail": lambda store: store.fail("s:train:0/1", at=1.0, error="no", category="server"),
    "snapshot": lambda store: store.set_snapshot("s:train:0", "journal/snapshots/a", 0),
    "checkpoint": lambda store: store.add_checkpoint(checkpoint()),
    "accept": lambda store: store.add_operation(operation(2), b"command"),
    "unload": lambda store: store.set_unloaded("s:train:0"),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_server_that_lost_its_lease_writes_nothing(write: str, place: Place) -> None:
    store, other = place.open(), place.open()
    store.add_run(run(), operation(0), b"create")
    store.add_operation(operation(1), b"command")
    lost = threading.Event()
    with own(place, store) as lease:
        lease.on_lost(lost.set)
        with other._write() as connection:  # as the next holder does
            connection.execute(metadata.tables["lease"].update().values(node="another", epoch=2))
        before = (other.get_run("s:train:0"), other.operations_of("s:train:0"), other.usage(), place.files())
        with pytest.raises(LeaseLost, match=r"taken over"):
            WRITES[write](store)
        assert (other.get_run("s:train:0"), other.operations_of("s:train:0"), other.usage(), place.files()) == before
        assert lost.is_set() and lease.is_lost
        assert store.get_run("s:train:0") is not None, "reading goes on"


def test_two_names_of_one_sqlite_file_are_one_database(sqlite_place: Place, tmp_path: Path) -> None:
    sqlite_place.open()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.db").symlink_to(tmp_path / "tinkex.db")
    linked = Place("sqlite", f"sqlite:///{tmp_path / 'elsewhere' / 'link.db'}", tmp_path / "elsewhere")
    with own(sqlite_place), pytest.raises(ConfigError, match=r"http://10.0.0.2:8000, writes"):
        own(linked).__enter__()
    linked.opened[0].close()


def test_files_that_a_new_data_folder_lacks_are_told_and_a_moved_one_is_whole(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: every restored backup and every moved folder was said to lack its checkpoints."""
    store = place.open()
    store.add_run(run(), operation(0), b"create")
    store.add_operation(operation(1), LARGE)
    store.add_checkpoint(checkpoint(folder="checkpoints/a"))
    (place.data_dir / "checkpoints" / "a").mkdir(parents=True)
    with own(place, store):
        pass
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    for name in ("journal", "checkpoints"):
        shutil.copytree(place.data_dir / name, whole / name)
    with store.lease(ADDRESS, whole):
        assert caplog.text == ""
    with store.lease(ADDRESS, bare):
        assert f"served with the data folder {whole} before; 2 of the checkpoints" in caplog.text
        assert f"not in {bare}" in caplog.text and "the first is checkpoints/a)" in caplog.text


def test_servers_in_two_schemas_of_one_database_do_not_meet(postgres_place: Place, fresh_postgres_place: Place) -> None:
    with own(postgres_place), own(fresh_postgres_place) as second:
        assert not second.is_lost


def test_a_frozen_server_is_replaced_when_its_lease_has_run_out(
    postgres_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session lives on, and with it the lock: the next server ends it. The frozen one is fenced when it wakes."""
    frozen, store = postgres_place.open(), postgres_place.open()
    frozen.add_run(run(), operation(0), b"create")
    monkeypatch.setattr(leases.AdvisoryLock, "_renew", lambda lock: True)  # it does not
    with own(postgres_place, frozen) as lost:
        with pytest.raises(ConfigError):
            own(postgres_place, store).__enter__()
        with psycopg.connect(postgres_place.url, autocommit=True) as connection:
            connection.execute("UPDATE lease SET until = until - 60")
        with own(postgres_place, store) as taken:
            with pytest.raises(LeaseLost):
                frozen.finish("s:train:0/0", at=1.0, result=b"{}", result_type="json")
            assert lost.is_lost and not taken.is_lost
            store.finish("s:train:0/0", at=1.0, result=b"{}", result_type="json")


def test_a_server_keeps_its_lease_when_the_database_loses_its_connections(
    postgres_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart of PostgreSQL frees the lock; the row says that nobody else has come, and the lock is taken again."""
    store, second = postgres_place.open(), postgres_place.open()
    renewed = threading.Semaphore(0)
    renew = leases.AdvisoryLock._renew

    def noted(lock: leases.AdvisoryLock) -> bool:
        is_ours = renew(lock)
        renewed.release()
        return is_ours

    monkeypatch.setattr(leases.AdvisoryLock, "_renew", noted)
    monkeypatch.setattr(leases.AdvisoryLock.__init__, "__defaults__", (0.02,))
    with own(postgres_place, store) as lease:
        before = until(postgres_place)
        for _ in range(3):
            assert renewed.acquire(timeout=10)
        assert until(postgres_place) > before, "others see it renewed"
        with psycopg.connect(postgres_place.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'tinkex'"
            )
        while renewed.acquire(blocking=False):
            pass
        assert renewed.acquire(timeout=10)
        store.add_run(run(), operation(0), b"create")
        assert not lease.is_lost
        with pytest.raises(ConfigError, match=r"http://10.0.0.2:8000"):
            own(postgres_place, second).__enter__()


def test_a_server_that_could_not_lock_again_at_once_is_not_replaced(
    postgres_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: after a lost connection it tried once; without the lock, the next server took over from a healthy one."""
    renewed = threading.Semaphore(0)
    renew = leases.AdvisoryLock._renew

    def noted(lock: leases.AdvisoryLock) -> bool:
        is_ours = renew(lock)
        renewed.release()
        return is_ours

    def wait_for_renewals() -> None:
        while renewed.acquire(blocking=False):
            pass
        for _ in range(3):
            assert renewed.acquire(timeout=10)

    monkeypatch.setattr(leases.AdvisoryLock, "_renew", noted)
    monkeypatch.setattr(leases.AdvisoryLock.__init__, "__defaults__", (0.02,))
    store, second = postgres_place.open(), postgres_place.open()
    with own(postgres_place, store) as lease:
        with psycopg.connect(postgres_place.url, autocommit=True) as lingering:  # as our own lost session may do
            waiting = threading.Thread(target=lingering.execute, args=(f"SELECT pg_advisory_lock({leases._KEY})",))
            waiting.start()
            with psycopg.connect(postgres_place.url, autocommit=True) as connection:
                while not connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
                    REAL.pause(0.01)
                connection.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'tinkex'"
                )
            waiting.join()
            wait_for_renewals()
        wait_for_renewals()
        with pytest.raises(ConfigError, match=r"http://10.0.0.2:8000"):
            own(postgres_place, second).__enter__()
        assert not lease.is_lost


def test_a_newer_release_does_not_change_the_tables_of_a_server_that_runs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the second server was refused only after it had upgraded the database of the first."""
    changed: list[Connection] = []
    newer = (*migrations.MIGRATIONS, changed.append)

    def version(store: Store) -> int | None:
        with store._read() as connection:
            return connection.scalar(select(schema_version.c.version))

    store = place.open()
    before = version(store)
    try:
        with own(place, store):
            place.open()  # `tinkex key`, of the same release
            monkeypatch.setattr(migrations.migrate, "__defaults__", (newer,))
            with pytest.raises(ConfigError, match=r"http://10.0.0.2:8000 writes.*older release.*Stop that server"):
                place.open()
            assert (changed, version(store)) == ([], before)
        assert version(place.open()) == len(newer) and len(changed) == 1, "it was stopped"
    finally:
        with store._write() as connection:
            connection.execute(schema_version.update().values(version=before))


def test_a_server_that_waits_for_the_former_one_does_not_lose_its_lease_meanwhile(
    postgres_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: it renewed a row that was not its own yet, and so found that it had lost the lease."""
    monkeypatch.setattr(leases.AdvisoryLock.__init__, "__defaults__", (0.01,))
    acquire = leases.Lease.acquire

    def slowly(lease: Lease, connection: Connection) -> None:
        acquire(lease, connection)
        REAL.pause(0.2)

    monkeypatch.setattr(leases.Lease, "acquire", slowly)
    with own(postgres_place) as lease:
        assert not lease.is_lost


def test_an_idle_server_notices_that_another_one_has_taken_over(
    postgres_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases.AdvisoryLock.__init__, "__defaults__", (0.02,))
    lost = threading.Event()
    with own(postgres_place) as lease:
        lease.on_lost(lost.set)
        with psycopg.connect(postgres_place.url, autocommit=True) as connection:
            connection.execute("UPDATE lease SET node = 'another'")
        assert lost.wait(10)
