"""A server that is kept running: what its supervisor says of a start that fails, and that it can be stopped."""

from __future__ import annotations

import threading
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
