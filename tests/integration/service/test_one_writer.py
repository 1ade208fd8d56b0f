"""Two real servers, one PostgreSQL: the second does not start, and one that was frozen and replaced writes nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Raw, batch
from tests.unit.store.postgres import PostgresServer

STEP = {"learning_rate": 0.01}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


def end_sessions(postgres: PostgresServer) -> None:
    """What a restart or a failover of PostgreSQL does to its clients."""
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'tinkex'"
        )


def test_a_second_server_is_rejected_and_a_frozen_one_that_was_replaced_stores_nothing_and_stops(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """Both used to train the same run: a checkpoint lacked the steps of the other."""
    flags = ("--database-url", postgres.url())
    first, second = LiveServer(tmp_path / "data", *flags), LiveServer(tmp_path / "other", *flags)
    first.start()
    try:
        run = Raw(first).run()
        run.done("forward_backward", forward_backward_input=batch())
        try:
            with pytest.raises(AssertionError, match=rf"Another server, {first.url}, writes this database"):
                second.start()
            assert first.process is not None and second.process is not None and second.process.returncode == 1
        finally:
            second.kill()

        first.process.send_signal(signal.SIGSTOP)
        end_sessions(postgres)
        third = LiveServer(tmp_path / "other", *flags)
        third.start()
        try:
            first.process.send_signal(signal.SIGCONT)
            late = Raw(first).post("optim_step", run.named(adam_params=STEP))
            assert late.status == 503 and "taken over" in late.text
            assert first.process.wait(20) == 1
            assert "another server has taken over this database; this one stops" in first.log()
            with psycopg.connect(postgres.url()) as connection:
                row = connection.execute("SELECT count(*) FROM operations WHERE seq_id = 2").fetchone()
            assert row == (0,), "the late step is not in the journal"
        finally:
            third.stop()
    finally:
        assert first.process is not None
        first.process.kill()
        first.process.wait(10)
