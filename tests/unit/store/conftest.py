"""The same store on SQLite and on PostgreSQL, and records to put into it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.unit.store.postgres import PostgresServer
from tinkex.store.records import CheckpointRecord, OperationRecord, RunRecord, SamplerRecord, SessionRecord
from tinkex.store.store import Store
from tinkex.store.tables import metadata, schema_version

LARGE = bytes(range(256)) * 400
"""More than fits into a row."""
_numbers = itertools.count()


@dataclass
class Place:
    """A database and its data folder. `open` opens it, as often as a test likes."""

    kind: str
    url: str
    data_dir: Path
    opened: list[Store] = field(default_factory=list)

    def open(self, **options: Any) -> Store:
        store = Store.open(self.url, self.data_dir, **options)
        self.opened.append(store)
        return store

    def files(self) -> list[Path]:
        return [path for path in (self.data_dir / "journal").rglob("*") if path.is_file()]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def fresh_postgres_place(postgres: PostgresServer, tmp_path: Path) -> Iterator[Place]:
    """A database without tables."""
    name = f"test_{next(_numbers)}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    place = Place("postgresql", postgres.url(name), tmp_path)
    yield place
    for store in place.opened:
        store.close()


@pytest.fixture(scope="session")
def postgres_url(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with tables, made once: making them takes longer than most tests."""
    Store.open(postgres.url(), tmp_path_factory.mktemp("postgres")).close()
    return postgres.url()


@pytest.fixture
def postgres_place(postgres_url: str, tmp_path: Path) -> Iterator[Place]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        emptied = [f"DELETE FROM {name}" for name in metadata.tables if name != schema_version.name]
        connection.execute("; ".join(emptied))
    place = Place("postgresql", postgres_url, tmp_path)
    yield place
    for store in place.opened:
        store.close()


@pytest.fixture
def sqlite_place(tmp_path: Path) -> Iterator[Place]:
    place = Place("sqlite", f"sqlite:///{tmp_path / 'tinkex.db'}", tmp_path)
    yield place
    for store in place.opened:
        store.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue("sqlite_place" if request.param == "sqlite" else "postgres_place")
    return found


@pytest.fixture
def store(place: Place) -> Store:
    return place.open()


def session(id: str = "s", **values: Any) -> SessionRecord:
    given = {"tenant": "ann", "created_at": 1.0, "seen_at": 1.0, **values}
    return SessionRecord(id=id, **given)


def run(id: str = "s:train:0", **values: Any) -> RunRecord:
    given: dict[str, Any] = {
        "tenant": "ann",
        "session_id": id.split(":")[0],
        "base_model": "tinkex/tiny",
        "rank": 8,
        "seed": 7,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": False,
        "created_at": 1.0,
        "last_request_at": 1.0,
        **values,
    }
    return RunRecord(id=id, **given)


def operation(seq_id: int, run_id: str = "s:train:0", **values: Any) -> OperationRecord:
    given: dict[str, Any] = {
        "request_id": f"{run_id}/{seq_id}",
        "tenant": "ann",
        "kind": "optim_step",
        "digest": f"digest-{seq_id}",
        "created_at": 10.0 + seq_id,
        **values,
    }
    return OperationRecord(run_id=run_id, seq_id=seq_id, **given)


def checkpoint(name: str = "a", **values: Any) -> CheckpointRecord:
    given: dict[str, Any] = {
        "tenant": "ann",
        "run_id": "s:train:0",
        "kind": "weights",
        "base_model": "tinkex/tiny",
        "rank": 8,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": False,
        "created_at": 1.0,
        "size_bytes": 100,
        "files": {"adapter_model.safetensors": {"size_bytes": 100, "sha256": "ab"}},
        **values,
    }
    path = f"tinker://{given['run_id']}/{given['kind']}/{name}"
    return CheckpointRecord(**{"path": path, "name": name, "folder": f"checkpoints/{name}", **given})


def sampler(id: str = "s:sample:0", **values: Any) -> SamplerRecord:
    given = {"tenant": "ann", "session_id": "s", "base_model": "tinkex/tiny", "created_at": 1.0, **values}
    return SamplerRecord(id=id, **given)


@pytest.fixture
def started(store: Store) -> Store:
    """A store with one run, created and done."""
    store.add_run(run(), operation(0, kind="create_model"), b"create")
    store.finish("s:train:0/0", at=11.0, result=b"{}", result_type="json")
    return store


Add = Callable[..., OperationRecord]


@pytest.fixture
def add(started: Store) -> Add:
    """Add an operation to the run of `started`."""

    def add(seq_id: int, command: bytes | None = b"command", **values: Any) -> OperationRecord:
        added = replace(operation(seq_id), **values)
        started.add_operation(added, command)
        return added

    return add
