"""A stopped engine, a full disk, a silent PostgreSQL, a journal that cannot be read: each is told in seconds."""

from __future__ import annotations

import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.databases import BreakablePostgres
from tests.integration.service.live import CACHE, LiveServer
from tests.integration.service.raw import Answer, Raw, batch
from tests.unit.engine import fake_hub
from tests.unit.server.test_memory import GROWN_BY_LARGE_BLOCKS
from tinkex.server.upkeep.readiness import SILENT_S
from tinkex.store.store import Store

pytestmark = pytest.mark.slow
PATIENCE_S = 40.0
"""For a machine that does much else; what is waited for takes some ten seconds."""


def wait_for(call: Callable[[], Answer], status: int) -> Answer:
    end = time.monotonic() + PATIENCE_S
    while (answer := call()).status != status:
        assert time.monotonic() < end, f"still {answer.status}: {answer.content!r}"
        time.sleep(0.1)
    return answer


def ready(client: Raw) -> Answer:
    return client.ask("GET", "/readyz", timeout_s=6)


def live(client: Raw) -> Answer:
    return client.ask("GET", "/livez", timeout_s=6)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """On a disk of its own, if this user may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    mount("-t", "tmpfs", "-o", "size=400m,mode=0700", "tmpfs", str(folder))
    (folder / "data").mkdir()
    server = LiveServer(folder / "data", "--api-key", "tml-health-0123456789")
    server._log = folder.parent / "health.log"
    try:
        with server:
            yield server
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def mount(*words: str) -> bool:
    try:
        return subprocess.run(["mount", *words], check=False, capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


def test_health_needs_no_key(server: LiveServer) -> None:
    client = Raw(server)
    assert [live(client).json, wait_for(lambda: ready(client), 200).json] == [{"status": "ok"}] * 2
    assert client.get("healthz").status == 200


def test_a_stopped_engine_is_not_ready_and_is_again_when_it_goes_on(server: LiveServer) -> None:
    """It was never noticed: /api/v1/healthz was 200 for as long as it was stopped."""
    client, engine = Raw(server), server.engine_pid()
    assert engine is not None
    wait_for(lambda: ready(client), 200)
    os.kill(engine, signal.SIGSTOP)
    try:
        answer = wait_for(lambda: ready(client), 503)
        assert "engine has not responded for" in answer.text and answer.headers["retry-after"]
        assert client.get("healthz").status == 503 and live(client).status == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_for(lambda: ready(client), 200)


def test_a_full_disk_is_not_ready(server: LiveServer) -> None:
    client, disk = Raw(server), server.data_dir.parent
    if not os.path.ismount(disk):
        pytest.skip("needs a mount of its own")
    wait_for(lambda: ready(client), 200)
    assert mount("-o", "remount,size=100m", str(disk))
    try:
        assert " MB left" in wait_for(lambda: ready(client), 503).text
        assert live(client).status == 200
    finally:
        mount("-o", "remount,size=400m", str(disk))
    wait_for(lambda: ready(client), 200)


def test_a_server_that_is_told_to_stop_while_it_starts_ends_with_exit_code_0(tmp_path: Path) -> None:
    """Before: SIGTERM killed it until its event loop ran; the fault harness saw "ended with -15" in 5 of 750 seeds."""
    server = LiveServer(tmp_path / "data", max_files=256)
    server.start(wait_s=0)
    end = time.monotonic() + PATIENCE_S
    while "256 files can be open" not in server.log():  # its first line, before it opens the store
        assert time.monotonic() < end, server.log()
        time.sleep(0.01)
    assert server.stop() == 0, server.log()
    with server:  # nothing that it held keeps the next one out
        assert server.is_ready()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_server_that_is_told_to_stop_does_not_wait_for_the_download_of_its_model(
    tmp_path: Path, number: int, code: int
) -> None:
    """Python waits for the threads of a download: for the rest of a file, which may take hours."""
    hub = fake_hub.Hub("acme/slow", {"model.safetensors": b"x" * 2_000_000}, stalls=True)
    with fake_hub.serve(hub):
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "tinkex", "serve", "--base-model", "acme/slow", "--port", "0"]
        command += ["--data-dir", str(tmp_path / "data"), "--cache-dir", str(tmp_path / "cache")]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            assert hub.has_stalled.wait(PATIENCE_S), (tmp_path / "log").read_text()
            process.send_signal(number)
            assert process.wait(10) == code, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait(10)
        said = (tmp_path / "log").read_text()
        assert said.count("tinkex: stopped.\n") == (number == signal.SIGINT) and "Traceback" not in said


SERVE_AND_TELL = f"""
import gc, os, signal, sys
{GROWN_BY_LARGE_BLOCKS}
from tinkex.server.main import serve
from tinkex.settings import ServeConfig

def on_ready(needs_key, address):
    settings = gc.get_freeze_count(), gc.get_threshold()[0], sys.getswitchinterval()
    print(*settings, grown_mb(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

config = ServeConfig(data_dir=sys.argv[1], cache_dir=sys.argv[2], port=0, base_models=("tinkex/tiny",))
sys.exit(serve(config, on_ready=on_ready))
"""


def test_a_server_that_is_ready_has_set_up_its_interpreter_and_its_heap(tmp_path: Path) -> None:
    """Before: collections of everything stopped the loop for 60 to 220 ms each, and beside a thread that decoded a body
    it waited 5 ms after every read and write of a socket (docs/LOG.md, 2026-11-18 and 2026-11-19). What large bodies
    needed stayed with the threads that had read them."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE_AND_TELL, str(tmp_path / "data"), str(CACHE)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    frozen, first, switch_s, grown_mb = map(float, done.stdout.split())
    assert frozen > 50_000
    assert first >= 10_000
    assert switch_s <= 0.001
    assert grown_mb <= 30, "without `return_large_blocks`: 96 to 136"


def test_a_journal_that_cannot_be_read_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    """It used to hang with its port bound, without a line in its log."""
    server = LiveServer(tmp_path / "data")
    Store.open(f"sqlite:///{tmp_path / 'data' / 'tinkex.db'}", tmp_path / "data").close()
    with sqlite3.connect(tmp_path / "data" / "tinkex.db") as connection:
        connection.execute("ALTER TABLE operations RENAME TO gone")
    connection.close()
    server.start(wait_s=0)
    assert server.process is not None
    try:
        assert server.process.wait(PATIENCE_S) == 1
    finally:
        server.kill()
    assert "The service cannot start, because its journal cannot be read" in server.log()


# ── PostgreSQL


class SilentProxy:
    """Passes bytes between TCP and a unix socket, until it swallows them."""

    def __init__(self, target: str) -> None:
        self._target, self._listener = target, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.is_silent = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as database:
            database.connect(self._target)
            while True:
                for source in select.select([client, database], [], [])[0]:
                    content = source.recv(65536)
                    if not content:
                        return
                    if not self.is_silent:
                        (database if source is client else client).sendall(content)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def postgres() -> Iterator[BreakablePostgres]:
    postgres = BreakablePostgres()
    yield postgres
    postgres.stop()


def assert_told_and_mended(client: Raw, mend: Callable[[], None]) -> None:
    """With the database silent or gone: errors that name it, soon; then the same requests succeed."""
    try:
        assert live(client).status == 200
        assert "database" in wait_for(lambda: ready(client), 503).text
        health = client.ask("GET", "healthz", timeout_s=6)
        assert health.status == 503 and "database" in health.text
        answer = client.ask("GET", "training_runs", timeout_s=PATIENCE_S)
        assert answer.status == 503 and answer.headers["retry-after"] and "database" in answer.text
    finally:
        mend()
    wait_for(lambda: client.get("training_runs"), 200)
    wait_for(lambda: ready(client), 200)
    assert client.get("healthz").status == 200


def test_a_stopped_postgresql_gives_503_and_all_goes_on_afterwards(postgres: BreakablePostgres, tmp_path: Path) -> None:
    """Every request used to hang, and /api/v1/healthz was 200."""
    with LiveServer(tmp_path / "data", "--database-url", postgres.url()) as server:
        client = Raw(server)
        run = client.run()
        run.done("forward_backward", forward_backward_input=batch())
        postgres.signal_all(signal.SIGSTOP)
        assert_told_and_mended(client, lambda: postgres.signal_all(signal.SIGCONT))
        run.done("optim_step", adam_params={"learning_rate": 0.01})


def test_a_postgresql_that_is_gone_gives_503_and_all_goes_on_once_it_is_back(
    postgres: BreakablePostgres, tmp_path: Path
) -> None:
    with LiveServer(tmp_path / "data", "--database-url", postgres.url()) as server:
        client = Raw(server)
        run = client.run()
        run.done("forward_backward", forward_backward_input=batch())
        postgres.end("immediate")
        assert_told_and_mended(client, postgres.start_again)
        run.done("optim_step", adam_params={"learning_rate": 0.01})


def test_a_service_whose_database_is_starting_waits_for_it(postgres: BreakablePostgres, tmp_path: Path) -> None:
    """Before: it ended with exit code 1, when it started or when it told its address (fault harness, seed 548)."""
    server = LiveServer(tmp_path / "data", "--database-url", postgres.url())
    postgres.end("fast")
    server.start(wait_s=0)
    try:
        end = time.monotonic() + PATIENCE_S
        while "Trying again" not in server.log():
            assert time.monotonic() < end, server.log()
            time.sleep(0.05)
        postgres.start_again()
        server.wait_until_ready(PATIENCE_S)
    finally:
        assert server.stop() == 0


def test_a_database_that_refuses_is_not_waited_for(postgres: BreakablePostgres, tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data", "--database-url", postgres.url().replace("/postgres?", "/nothing?"))
    server.start(wait_s=0)
    assert server.process is not None and server.process.wait(PATIENCE_S) != 0
    assert 'database "nothing" does not exist' in server.log() and "Trying again" not in server.log()


@pytest.mark.full
def test_a_network_that_swallows_packets_gives_503_and_all_goes_on_afterwards(
    postgres: BreakablePostgres, tmp_path: Path
) -> None:
    proxy = SilentProxy(str(postgres.folder / ".s.PGSQL.5432"))
    url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?sslmode=disable"
    try:
        with LiveServer(tmp_path / "data", "--database-url", url) as server:
            client = Raw(server)
            run = client.run()
            run.done("forward_backward", forward_backward_input=batch())
            proxy.is_silent = True
            assert_told_and_mended(client, lambda: setattr(proxy, "is_silent", False))
            run.done("optim_step", adam_params={"learning_rate": 0.01})
    finally:
        proxy.close()


def test_the_limit_for_silence_is_far_above_a_beat() -> None:
    from tinkex.engine.process.main import BEAT_S

    assert SILENT_S >= 5 * BEAT_S
