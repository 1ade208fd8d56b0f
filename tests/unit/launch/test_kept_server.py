"""A server that is kept running: what its supervisor says of a start that fails, and that it can be stopped."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tinkex.launch.kept_server import KeptServer
from tinkex.settings import ServeConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def open_to_all(tmp_path: Path) -> ServeConfig:
    """Settings that `tinkex serve` rejects before it loads a model."""
    return ServeConfig(host="0.0.0.0", port=0, data_dir=tmp_path / "data", base_models=("tinkex/tiny",))


def changes_of(server: KeptServer) -> threading.Semaphore:
    changes = threading.Semaphore(0)
    server.on_change = changes.release
    return changes


def test_a_first_start_that_fails_is_given_up_with_its_reason(
    open_to_all: ServeConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    server = KeptServer("engine 1", lambda: open_to_all)
    changes = changes_of(server)
    server.start()
    assert changes.acquire(timeout=60)
    assert server.has_given_up and not server.state.is_ready
    assert server.state.starts == 1
    assert "ended with exit code 1: Host 0.0.0.0 can be reached from other machines" in server.state.failure
    assert "engine 1: tinkex: Host 0.0.0.0 can be reached" in capfd.readouterr().err
    server.wait_stopped()


def test_a_patient_one_is_started_again_until_it_is_stopped(open_to_all: ServeConfig) -> None:
    server = KeptServer("train-0", lambda: open_to_all, is_patient=True)
    changes = changes_of(server)
    server.start()
    for _ in range(2):
        assert changes.acquire(timeout=60)
    assert server.state.starts == 2 and not server.has_given_up
    server.request_stop()
    server.wait_stopped()
    pid = server.state.pid
    assert not Path(f"/proc/{pid}").exists()
    assert server.state.starts <= 3


def test_settings_that_cannot_be_made_are_a_failure_and_not_the_end(open_to_all: ServeConfig) -> None:
    """Here: no port is free, at the first attempt."""
    attempts: list[int] = []

    def configure() -> ServeConfig:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no port is free")
        return open_to_all

    server = KeptServer("train-0", configure, is_patient=True)
    changes = changes_of(server)
    server.start()
    assert changes.acquire(timeout=60)
    assert changes.acquire(timeout=60)
    assert len(attempts) >= 2 and server.state.starts >= 1
    server.request_stop()
    server.wait_stopped()


class Scripted(KeptServer):
    """Its child runs a few lines instead of `tinkex serve`."""

    def __init__(self, config: ServeConfig, program: str) -> None:
        super().__init__("engine 1", lambda: config)
        self._program = program

    def _popen(self, folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self._program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


READY = """print('{"url": "https://public.example", "needs_key": true}', flush=True); sys.stdin.read()"""


@pytest.mark.parametrize(
    ("node_url", "known_as"), [("http://10.0.0.7:81", "http://10.0.0.7:81"), (None, "https://public.example")]
)
def test_a_node_is_known_by_its_own_address_whatever_the_public_one_is(
    node_url: str | None, known_as: str, open_to_all: ServeConfig
) -> None:
    """Before: with --public-url all nodes of a Ray cluster had that one, and `cluster down` found none to drain."""
    config = replace(open_to_all, node_url=node_url, public_url="https://public.example")
    server = Scripted(config, f"import sys; {READY}")
    changes = changes_of(server)
    server.start()
    assert changes.acquire(timeout=30)
    assert server.state.is_ready and server.state.url == known_as
    server.request_stop()
    server.wait_stopped()


def test_a_server_whose_log_cannot_be_printed_goes_on(
    open_to_all: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a full disk ended the thread that reads its log, and it waited for the pipe with its first 64 KB."""

    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", FullDisk())
    server = Scripted(open_to_all, f"import sys\nfor _ in range(4000): print('x' * 100, file=sys.stderr)\n{READY}")
    changes = changes_of(server)
    server.start()
    assert changes.acquire(timeout=30), "it waits for somebody to read its log"
    assert server.state.is_ready
    server.request_stop()
    server.wait_stopped()
