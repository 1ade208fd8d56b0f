"""`tinkex serve --engines N`: several engines on one machine behind one address, started and ended by one command."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.cluster.processes import kill_marked, marked, until_none
from tests.cluster.training import Trainer
from tests.integration.service.live import CACHE, LiveServer
from tests.unit.store.postgres import PostgresServer

pytestmark = pytest.mark.full
STEPS = 30
KEY = "tml-test-of-engines"


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


class Engines:
    """One command, and everything that it has started."""

    def __init__(self, url: str, folder: Path, *flags: str, count: int = 2) -> None:
        self.mark = f"TEST_OF_ENGINES={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.folder, self.database = folder / "data", url
        self._log = folder / "log"
        words = [sys.executable, "-m", "tinkex", "-o", "json", "serve", "--engines", str(count), "--port", "0"]
        words += ["--base-model", "tinkex/tiny", "--cache-dir", str(CACHE), "--node-lease-s", "3", "--drain-s", "5"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*words, "--data-dir", str(self.folder), *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, name: value, "TINKEX_DATABASE_URL": url},
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready: dict[str, Any] = json.loads(line) if line else {}

    @property
    def log(self) -> str:
        return self._log.read_text()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database) as connection:
            return connection.execute(query, values).fetchall()

    def server_at(self, url: str) -> int:
        """The process that listens at an address, by its log."""
        port = url.rpartition(":")[2]
        for pid, words in marked(self.mark):
            if "--private" in words and port in _ports_of(pid):
                return pid
        raise AssertionError(f"nothing listens at {url}")

    def end(self) -> None:
        kill_marked(self.mark)
        self.process.wait(10)


def _ports_of(pid: int) -> set[str]:
    """The TCP ports that a process listens on."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {
        str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    }


@pytest.fixture
def engines(postgres: PostgresServer, tmp_path: Path) -> Iterator[Engines]:
    running = Engines(_schema(postgres, tmp_path), tmp_path)
    yield running
    running.end()


def _schema(postgres: PostgresServer, folder: Path) -> str:
    name = f"engines_{abs(hash(folder)) % 10**9}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return postgres.url(name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one server with as many threads as each of the engines makes of the same steps."""
    with LiveServer(tmp_path_factory.mktemp("alone") / "data", "--threads", "1") as server:
        return Trainer(server.url, STEPS, KEY).digests()


def test_one_command_serves_with_two_engines_and_ends_them(engines: Engines, undisturbed: dict[str, str]) -> None:
    """Two runs are at home on two engines; the losses are those of one server; nothing is left after SIGTERM."""
    assert engines.ready["models"] == ["tinkex/tiny"] and engines.ready["pid"] == engines.process.pid
    trainers = [Trainer(engines.ready["url"], STEPS, KEY) for _ in range(2)]
    homes = engines.rows("SELECT DISTINCT node FROM homes")
    assert len(homes) == 2
    assert [trainer.digests() for trainer in trainers] == [undisturbed, undisturbed]
    file = engines.folder / "cluster-secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret, commands = file.read_text().strip(), [words for _, words in marked(engines.mark)]
    assert len(commands) == 6, "the command, two nodes with an engine each, and the front"
    assert not [words for words in commands if secret in " ".join(words) or "postgresql:" in " ".join(words)]
    assert secret not in engines.log
    engines.process.send_signal(signal.SIGTERM)
    assert engines.process.wait(30) == 0, engines.log
    until_none(engines.mark, 1.0)
    assert engines.rows("SELECT count(*) FROM nodes") == [(0,)], "each node has left the cluster"


@pytest.mark.timing
def test_an_engine_that_is_killed_is_started_again_and_its_run_goes_on(
    engines: Engines, undisturbed: dict[str, str]
) -> None:
    trainer = Trainer(engines.ready["url"], STEPS, KEY)
    trainer.wait_for_step(5)
    query = "SELECT n.url FROM homes h JOIN nodes n ON n.id = h.node WHERE h.run_id = %s"
    [(url,)] = engines.rows(query, trainer.run_id)
    victim = engines.server_at(url)
    os.kill(victim, signal.SIGKILL)
    trainer.skip_to_now()
    began = time.monotonic()
    went_on = trainer.wait_for_step(trainer.steps_done) - began
    print(f"the run went on after {went_on:.1f} s")
    assert went_on <= 3 + 15
    assert trainer.digests() == undisturbed, engines.log
    end = time.monotonic() + 60
    while len(engines.rows("SELECT 1 FROM nodes WHERE until > extract(epoch FROM clock_timestamp())")) < 2:
        assert time.monotonic() < end, engines.log
        time.sleep(0.2)
    assert victim not in [pid for pid, _ in marked(engines.mark)]
    assert "starting it again in 0.0 s" in engines.log


@pytest.mark.timing
def test_everything_ends_with_a_command_that_was_killed(engines: Engines) -> None:
    trainer = Trainer(engines.ready["url"], STEPS, KEY)
    trainer.wait_for_step(2)
    os.kill(engines.process.pid, signal.SIGKILL)
    engines.process.wait(10)
    took = until_none(engines.mark, 20.0)
    trainer.end()
    print(f"everything had ended after {took:.1f} s")
    assert engines.rows("SELECT count(*) FROM nodes") == [(0,)], "in order"


def test_a_start_that_fails_ends_with_the_reason(postgres: PostgresServer, tmp_path: Path) -> None:
    """Here: the front's port is taken."""
    with LiveServer(tmp_path / "other") as other:
        failed = Engines(_schema(postgres, tmp_path), tmp_path, "--port", str(other.port))
        try:
            assert failed.ready == {}
            assert failed.process.wait(60) == 1
            until_none(failed.mark, 1.0)
        finally:
            failed.end()
    assert "front: tinkex: Cannot listen on 127.0.0.1" in failed.log
    assert "front could not start; its reason is above" in failed.log
