"""`tinkex.local(ephemeral=True)`: the server is ready when the call returns, and stops with its owner, in any way."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tinkex import local_service
from tinkex.errors import ConfigError, MissingExtra
from tinkex.local_service import LocalServiceClient, start
from tinkex.local_service.ephemeral import PrivateServer

from .processes import is_running, until_ended

pytestmark = pytest.mark.slow

KILLED = """
import time, tinkex
service = tinkex.local("tinkex/tiny", ephemeral=True, threads=1)
print(service.pid, service._server.folder, flush=True)
time.sleep(600)
"""
CRASHED = """
import tinkex
service = tinkex.local("tinkex/tiny", ephemeral=True, threads=1)
training = service.create_lora_training_client("tinkex/tiny", rank=4)
print(service.pid, flush=True)
raise RuntimeError("a mistake of the user's")
"""


@pytest.fixture(autouse=True, scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders of the test's own, and settings of a service that must not leak into a private one."""
    home = tmp_path_factory.mktemp("embed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKEX_CACHE_DIR", str(home / "cache"))
        patch.setenv("TINKEX_DATA_DIR", str(home / "a-service-that-others-use"))
        patch.setenv("TINKEX_PUBLIC_URL", "https://elsewhere.example")
        patch.setenv("TINKEX_KEYS_FILE", str(home / "missing"))
        patch.setenv("TINKEX_PROXY", "http://127.0.0.1:9")
        patch.delenv("TINKEX_KEYS_FILE")
        yield
        assert not (home / "a-service-that-others-use").exists()


@pytest.fixture(scope="module")
def service() -> Iterator[LocalServiceClient]:
    with tinkex.local("tinkex/tiny", ephemeral=True, threads=1) as made:
        yield made


def test_it_trains_and_samples(service: LocalServiceClient) -> None:
    training = service.create_lora_training_client("tinkex/tiny", rank=4)
    datum = tinkex.Datum(tinkex.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    before = training.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
    training.optim_step(tinkex.AdamParams(learning_rate=0.01)).result()
    after = training.forward([datum], "cross_entropy").result().metrics["loss:sum"]
    assert after < before
    sampler = training.save_weights_and_get_sampling_client()
    params = tinkex.SamplingParams(max_tokens=4, stop=[])
    drawn = sampler.sample(tinkex.ModelInput.from_ints([1]), 1, params).result()
    assert len(drawn.sequences[0].tokens) == 4


def test_requests_without_its_key_are_rejected(service: LocalServiceClient) -> None:
    assert service.base_url.startswith("http://127.0.0.1:")
    assert service.api_key.startswith("tml-") and len(service.api_key) > 40
    stranger = tinkex.ServiceClient(base_url=service.base_url, api_key="tml-a-stranger", proxy="")
    with pytest.raises(tinkex.AuthenticationError):
        stranger.get_server_capabilities()
    line = Path(f"/proc/{service.pid}/cmdline").read_text()
    assert service.api_key not in line, "other users of the machine can read command lines"
    assert service.api_key not in repr(service)
    assert repr(service) == f"<tinkex.local tinkex/tiny at {service.base_url} (pid {service.pid})>"


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(service: LocalServiceClient) -> None:
    assert os.getsid(service.pid) != os.getsid(0)
    assert os.getpgid(service.pid) != os.getpgid(0)


def test_closing_it_stops_the_server_and_removes_its_folder_even_after_a_fork(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "QUIET_S", 0.0)
    service = tinkex.local("tinkex/tiny", ephemeral=True, threads=1)
    assert "tinkex.local: starting tinkex/tiny (" in capsys.readouterr().err, "a start that takes a while says so"
    assert isinstance(service._server, PrivateServer)
    folder, pid = service._server.folder, service.pid
    assert folder.is_dir() and is_running(pid)
    # A child that was forked holds the pipe open too, and must not stop its parent's server.
    child = os.fork()
    if child == 0:
        service._server.stop()
        time.sleep(60)
        os._exit(0)
    try:
        assert is_running(pid)
        service.close().result()
        assert not is_running(pid)
        assert not folder.exists()
        assert "stopped" in repr(service)
        service.close().result()  # again is harmless
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_dropping_the_last_client_stops_the_server() -> None:
    training = tinkex.local("tinkex/tiny", ephemeral=True, threads=1).create_lora_training_client("tinkex/tiny", rank=4)
    gc.collect()
    assert training.get_info().lora_rank == 4, "the client of a service that was dropped still works"
    port = int(training._session.config.base_url.rpartition(":")[2])
    found = [pid for pid in _private_servers() if _listens(pid, port)]
    assert len(found) == 1
    del training
    gc.collect()
    assert until_ended(found[0])


def _private_servers() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--private" in words:
                found.append(int(entry.name))
    return found


def _listens(pid: int, port: int) -> bool:
    inodes = {
        line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines() if f":{port:04X} 00000000" in line
    }
    try:
        links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return False
    return any(f"socket:[{inode}]" in links for inode in inodes)


def test_an_unexpected_end_of_the_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        tinkex.local("tinkex/tiny", ephemeral=True, threads=1) as service,
        caplog.at_level(logging.ERROR, "tinkex.local"),
    ):
        assert isinstance(service._server, PrivateServer)
        os.kill(service.pid, signal.SIGKILL)
        assert service._server._thread.join(30) is None
        assert "ended unexpectedly (exit code -9)" in caplog.text
        assert not service._server.folder.exists()


def test_a_failed_start_is_one_error_with_the_servers_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others start servers meanwhile
    with pytest.raises(ConfigError, match=r"(?s)did not start.*\./no/such/model") as failed:
        tinkex.local("./no/such/model", ephemeral=True)
    assert "Traceback" not in str(failed.value)
    assert list(tmp_path.iterdir()) == []


def test_killing_the_owner_stops_the_server_and_removes_its_folder() -> None:
    owner = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split()
    assert is_running(int(pid)) and Path(folder).is_dir()
    owner.kill()
    owner.communicate()
    assert until_ended(int(pid))
    assert not Path(folder).exists()


@pytest.mark.timing
def test_an_exception_stops_the_server_and_exit_is_quick() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CRASHED], capture_output=True, text=True, timeout=120, check=False)
    assert "a mistake of the user's" in done.stderr
    assert until_ended(int(done.stdout))
    assert time.monotonic() - began < 100


def test_settings_are_passed_on_and_those_it_chooses_are_rejected(tmp_path: Path) -> None:
    config = local_service._private_config(("tinkex/tiny",), tmp_path, {"max_rows": 3})
    assert (config.max_rows, config.port, config.host, config.public_url) == (3, 0, "127.0.0.1", None)
    assert config.database_url == f"sqlite:///{config.data_dir / 'tinkex.db'}"
    with pytest.raises(ConfigError, match=r"chooses api_keys, port itself"):
        tinkex.local("tinkex/tiny", port=1, api_keys=["tml-12345678"])
    with pytest.raises(ConfigError, match="ephemeral=True keeps nothing"):
        tinkex.local("tinkex/tiny", ephemeral=True, data_dir=tmp_path)
    with pytest.raises(ConfigError, match="max_rowz"):
        tinkex.local("tinkex/tiny", max_rowz=3)
    with pytest.raises(ConfigError, match="device must be"):
        tinkex.local("tinkex/tiny", device="abacus")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'tinkex\[local\]'"):
        tinkex.local()
