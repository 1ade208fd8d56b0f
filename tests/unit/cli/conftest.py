"""A service with a run and two checkpoints, an environment of its own, and the command as a function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tinkex
from tinkex.cli.main import main
from tinkex.clock import REAL
from tinkex.home.lock import FileLock
from tinkex.home.owner_key import write_key
from tinkex.home.running import RunningService, write_service
from tinkex.testing import ScriptedService

KEY = "tml-a-key-for-tests"
OWNER_KEY = "tml-the-owner-of-this-folder"


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Saved(NamedTuple):
    run_id: str
    state: str
    sampler: str


Tinkex = Callable[..., Ran]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing of the developer's own settings; returns the home folder."""
    for name in list(os.environ):
        if name.startswith(("TINKER_", "TINKEX_", "CLOUDFLARE_ACCESS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name in ("NO_COLOR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "COLUMNS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TINKEX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TERM", "xterm")
    return home


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedService]:
    """The service that the environment names."""
    with ScriptedService(api_key=KEY) as running:
        monkeypatch.setenv("TINKER_BASE_URL", running.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        yield running


@pytest.fixture
def at_home(environment: Path) -> Iterator[ScriptedService]:
    """A service that runs on the home: no setting names it."""
    home = environment / ".local" / "share" / "tinkex"
    with ScriptedService(api_key=OWNER_KEY) as running, FileLock(home):
        write_key(home, OWNER_KEY)
        about = {"version": tinkex.__version__, "models": ("tinkex/tiny",), "started_at": REAL.wall()}
        write_service(home, RunningService(url=running.url, pid=os.getpid(), **about))  # type: ignore[arg-type]
        yield running


@pytest.fixture
def saved(service: ScriptedService) -> Saved:
    return save(service)


def save(service: ScriptedService) -> Saved:
    with tinkex.ServiceClient(base_url=service.url, api_key=KEY, telemetry=False) as client:
        training = client.create_lora_training_client("tinkex/tiny", rank=8, user_metadata={"team": "blue"})
        state = training.save_state("0001", ttl_seconds=2 * 86400).result().path
        sampler = training.save_weights_for_sampler("0001").result().path
        found = Saved(training.model_id, state, sampler)
    service.requests.clear()
    service.sessions.clear()
    return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Tinkex:
    """Runs the command in this process."""

    def call(*words: str) -> Ran:
        try:
            code = main(list(words))
        except SystemExit as end:  # how argparse ends: help, or a misused command
            code = int(end.code or 0)
        return Ran(code, *capsys.readouterr())

    return call


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Starts the command in a process of its own."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "tinkex", *words], **{**pipes, **options})
