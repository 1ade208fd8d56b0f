"""Databases of older releases are upgraded; newer or broken ones are rejected with a clear message."""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Column, Connection, MetaData, Table, Text, create_engine, inspect, select, text

from tests.unit.store.conftest import Place, checkpoint, operation, run, sampler, session
from tinkex.errors import ConfigError
from tinkex.store import migrations
from tinkex.store.database import values_of
from tinkex.store.store import Store
from tinkex.store.tables import metadata, schema_version, sessions


@pytest.fixture
def postgres_place(fresh_postgres_place: Place) -> Place:
    return fresh_postgres_place


def test_a_fresh_database_has_every_table_column_and_index_of_rows(place: Place) -> None:
    assert_newest(place.open())


def test_opening_again_changes_nothing(place: Place) -> None:
    place.open().add_run(run(), operation(0), b"create")
    again = place.open()
    assert again.command("s:train:0/0") == b"create"


def test_a_database_of_a_newer_release_is_rejected_and_not_changed(place: Place) -> None:
    store = place.open()
    with store._write() as connection:
        connection.execute(schema_version.update().values(version=99))
    store.close()
    with pytest.raises(ConfigError, match=r"newer release.*99.*Install"):
        place.open()
    with place.opened[0]._read() as connection:
        assert connection.scalar(select(schema_version.c.version)) == 99


def test_a_missing_table_column_or_index_is_added_and_rows_stay(place: Place) -> None:
    store = place.open()
    store.add_run(run(), operation(0), b"create")
    with store._write() as connection:
        for statement in (
            "DROP INDEX sessions_by_tenant",
            "DROP TABLE answers",
            "ALTER TABLE runs DROP COLUMN user_metadata",
        ):
            connection.execute(text(statement))
        connection.execute(schema_version.update().values(version=0))
    store.close()
    again = place.open()
    assert again.get_run("s:train:0") == run()
    assert again.remember("ann", "k", b"answer", 1.0) == b"answer"
    with again._read() as connection:
        assert "sessions_by_tenant" in {index["name"] for index in inspect(connection).get_indexes(sessions.name)}


def test_operations_of_version_2_get_their_tokens_from_their_cost(place: Place) -> None:
    """Version 2 had one column, `cost_tokens`: three times the tokens of a forward_backward."""
    store = place.open()
    store.add_run(run(), operation(0, kind="create_model"), b"create")
    for seq_id, kind, cost in ((1, "forward_backward", 300), (2, "forward", 40), (3, "optim_step", 0)):
        store.add_operation(operation(seq_id, kind=kind, cost_tokens=cost), b"command")
    with store._write() as connection:
        connection.execute(text("ALTER TABLE operations DROP COLUMN tokens"))
        connection.execute(schema_version.update().values(version=2))
    store.close()
    rows = place.open().operations_of("s:train:0")
    assert [(row.kind, row.cost_tokens, row.tokens) for row in rows] == [
        ("create_model", 0, 0), ("forward_backward", 300, 100), ("forward", 40, 40), ("optim_step", 0, 0),
    ]  # fmt: skip


def test_a_database_of_version_1_is_upgraded_and_keeps_its_rows(tmp_path: Path) -> None:
    """A column that a later version adds must be allowed to be empty, or have a default, for rows that exist."""
    with sqlite3.connect(tmp_path / "tinkex.db") as old:
        old.executescript((Path(__file__).parent / "version_1.sql").read_text())
    old.close()
    engine = create_engine(f"sqlite:///{tmp_path / 'tinkex.db'}")
    rows: dict[str, list[Any]] = {"sessions": [session()], "runs": [run()], "operations": [operation(0), operation(1)]}
    rows |= {"checkpoints": [checkpoint()], "samplers": [sampler()]}
    with engine.begin() as connection:
        for name, records in rows.items():
            columns = {column["name"] for column in inspect(connection).get_columns(name)}
            for record in records:
                values = {field: value for field, value in values_of(record).items() if field in columns}
                connection.execute(metadata.tables[name].insert().values(values))
    engine.dispose()
    with Store.open(f"sqlite:///{tmp_path / 'tinkex.db'}", tmp_path) as store:
        assert_newest(store)
        assert (store.get_session("s"), store.get_run("s:train:0")) == (session(), run())
        assert store.operations_of("s:train:0") == [operation(0), operation(1)]
        assert (store.get_checkpoint(checkpoint().path), store.get_sampler("s:sample:0")) == (checkpoint(), sampler())


OPTIONAL = sorted(
    (table.name, column.name) for table in metadata.tables.values() for column in table.columns if column.nullable
)
INDEXES = sorted((table.name, str(index.name)) for table in metadata.tables.values() for index in table.indexes)


@settings(max_examples=25, deadline=None)
@given(st.sets(st.sampled_from(OPTIONAL)), st.sets(st.sampled_from(INDEXES)), st.data())
def test_any_older_schema_is_upgraded_and_keeps_its_rows(
    columns: set[tuple[str, str]], indexes: set[tuple[str, str]], data: st.DataObject
) -> None:
    version = data.draw(st.integers(0, len(migrations.MIGRATIONS) - 1))
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/tinkex.db"
        with Store.open(url, Path(folder)) as store:
            store.add_session(session())
            store.add_run(run(), operation(0), b"create")
            store.add_checkpoint(checkpoint())
            store.add_sampler(sampler())
            with store._write() as connection:
                changed = {table for table, _ in columns}
                for table, name in INDEXES:
                    if (table, name) in indexes or table in changed:  # SQLite drops no column that an index uses
                        connection.execute(text(f"DROP INDEX {name}"))
                for table, column in columns:
                    connection.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))
                connection.execute(schema_version.update().values(version=version))
        with Store.open(url, Path(folder)) as store:
            assert_newest(store)
            # The columns that were dropped held nothing, so that all records are as they were.
            assert (store.get_session("s"), store.get_run("s:train:0")) == (session(), run())
            assert store.operations_of("s:train:0") == [operation(0)]
            assert store.get_checkpoint(checkpoint().path) == checkpoint()
            assert store.get_sampler("s:sample:0") == sampler()
            if ("payloads", "content") not in columns:
                assert store.command("s:train:0/0") == b"create"


def assert_newest(store: Store) -> None:
    with store._read() as connection:
        inspector = inspect(connection)
        for table in metadata.tables.values():
            assert {column["name"] for column in inspector.get_columns(table.name)} == set(table.columns.keys())
            names = {str(index["name"]) for index in inspector.get_indexes(table.name)}
            assert {index.name for index in table.indexes} <= names
        assert connection.scalars(select(schema_version.c.version)).all() == [len(migrations.MIGRATIONS)]


def test_each_migration_runs_once_and_in_order(place: Place) -> None:
    ran: list[int] = []
    steps = [lambda connection, n=n: ran.append(n) for n in (1, 2, 3, 4)]
    store = place.open()
    with store._write() as connection:
        connection.execute(schema_version.update().values(version=2))
    for _ in range(2):
        with store._write() as connection:
            migrations.migrate(connection, steps)
    assert ran == [3, 4]


def test_a_migration_that_fails_leaves_the_database_as_it_was(place: Place) -> None:
    other = MetaData()
    Table("later", other, Column("name", Text))

    def fails(connection: Connection) -> None:
        migrations.add_missing(connection, other)
        raise RuntimeError("no power")

    store = place.open()
    with pytest.raises(RuntimeError), store._write() as connection:
        migrations.migrate(connection, [*migrations.MIGRATIONS, fails])
    with store._read() as connection:
        assert "later" not in inspect(connection).get_table_names()
        assert connection.scalar(select(schema_version.c.version)) == len(migrations.MIGRATIONS)


def test_servers_that_open_a_new_database_at_once_all_succeed(place: Place) -> None:
    problems: list[BaseException] = []
    line = threading.Barrier(4)

    def open_it() -> None:
        try:
            line.wait(10)
            Store.open(place.url, place.data_dir).close()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_opening_waits_for_a_program_that_writes_the_new_database(tmp_path: Path) -> None:
    """SQLite refuses to turn such a file to WAL at once, however long it was told to wait."""
    other = sqlite3.connect(tmp_path / "tinkex.db", isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE theirs (name TEXT)")
    other.execute("BEGIN IMMEDIATE")
    letting_go = threading.Timer(0.2, other.execute, ["COMMIT"])
    letting_go.start()
    try:
        with Store.open(f"sqlite:///{tmp_path / 'tinkex.db'}", tmp_path) as store:
            assert not store.has_keys()
    finally:
        letting_go.join()
        other.close()


def test_a_file_that_is_not_a_database_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("Dear diary, " * 500)
    with pytest.raises(ConfigError, match=r"cannot be opened: file is not a database"):
        Store.open(f"sqlite:///{tmp_path / 'notes.db'}", tmp_path)


@pytest.mark.parametrize("url", ["mysql://me:hunter2@host/db", "sqlite://", "sqlite:///:memory:", "hunter2", "://"])
def test_an_unusable_database_url_is_rejected_without_its_password(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sqlite:///path") as caught:
        Store.open(url, tmp_path)
    assert "hunter2" not in str(caught.value)


def test_an_unreachable_postgresql_is_reported_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be opened") as caught:
        Store.open(f"postgresql://me:hunter2@/db?host={tmp_path}", tmp_path)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_spelling_of_a_postgresql_address_is_understood(scheme: str, postgres_place: Place) -> None:
    url = scheme + postgres_place.url.removeprefix("postgresql")
    with Store.open(url, postgres_place.data_dir) as store:
        assert not store.has_keys()


@pytest.mark.parametrize(("durability", "synchronous"), [("normal", 1), ("full", 2)])
def test_sqlite_uses_wal_and_the_configured_durability(sqlite_place: Place, durability: str, synchronous: int) -> None:
    store = sqlite_place.open(durability=durability)
    with store._read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == synchronous


def test_a_backup_is_a_database_of_one_file_with_every_row(sqlite_place: Place) -> None:
    store = sqlite_place.open()
    store.add_run(run(), operation(0), b"create")
    target = sqlite_place.data_dir / "copy" / "backup.db"
    target.parent.mkdir()
    store.backup(target)
    store.add_operation(operation(1), b"later")
    assert [path.name for path in target.parent.iterdir()] == ["backup.db"]
    assert sqlite3.connect(target).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with Store.open(f"sqlite:///{target}", sqlite_place.data_dir) as copy:
        assert copy.command("s:train:0/0") == b"create"
        assert copy.last_seq("s:train:0") == 0
    with pytest.raises(ConfigError, match=r"exists already"):
        store.backup(target)


def test_a_backup_of_postgresql_points_to_pg_dump(postgres_place: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pg_dump"):
        postgres_place.open().backup(tmp_path / "copy.db")


def test_added_columns_are_quoted(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'odd.db'}")
    with engine.begin() as connection:
        connection.execute(text('CREATE TABLE "order" (id INTEGER)'))
        wanted = MetaData()
        Table("order", wanted, Column("id", Text), Column("group", Text))
        migrations.add_missing(connection, wanted)
        assert [column["name"] for column in inspect(connection).get_columns("order")] == ["id", "group"]
    engine.dispose()
