"""Data that an older release wrote is opened by this one: runs are listed, checkpoints load, queued work goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.integration.service.live import LiveServer
from tests.integration.service.upgrades import FIXTURES, measure, unpack
from tests.unit.store.postgres import PostgresServer

KEPT = sorted(folder.name for folder in FIXTURES.iterdir())
NEAR = 1e-4
"""Relative: another processor, torch or number of threads adds in another order."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


def assert_as_written(server: LiveServer, expected: dict[str, Any]) -> None:
    measured, written = measure(server, expected), expected["measured"]
    assert set(measured["runs"]) >= set(written["runs"])
    assert measured["checkpoints"] == written["checkpoints"]
    assert len(measured["queued"]) == len(written["queued"])
    for now, then in zip(measured["queued"], written["queued"], strict=True):
        assert now == pytest.approx(then, rel=NEAR)
    losses = ("loss_of_run", "loss_of_checkpoint")
    assert {name: measured[name] for name in losses} == pytest.approx(
        {name: written[name] for name in losses}, rel=NEAR
    )


def test_there_is_a_fixture_of_every_release_so_far() -> None:
    assert "0.1.0-db3" in KEPT


@pytest.mark.slow
@pytest.mark.parametrize("version", KEPT)
def test_data_of_an_older_release_on_sqlite_goes_on_with_the_same_numbers(version: str, tmp_path: Path) -> None:
    expected = json.loads((FIXTURES / version / "expected.json").read_text())
    with LiveServer(unpack(FIXTURES / version, tmp_path / "data")) as server:
        assert_as_written(server, expected)


@pytest.mark.slow
@pytest.mark.parametrize("version", KEPT)
def test_data_of_an_older_release_on_postgresql_goes_on_with_the_same_numbers(
    version: str, tmp_path: Path, postgres: PostgresServer
) -> None:
    expected = json.loads((FIXTURES / version / "expected.json").read_text())
    data_dir = unpack(FIXTURES / version, tmp_path / "data")
    (data_dir / "tinkex.db").unlink()
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        connection.execute((FIXTURES / version / "postgres.sql").read_text().replace("CREATE SCHEMA public;", ""))
    with LiveServer(data_dir, "--database-url", postgres.url()) as server:
        assert_as_written(server, expected)
