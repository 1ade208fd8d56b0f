"""The examples run as a user runs them, on a real service with the tiny model that the environment names."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.service.live import LiveServer

ROOT = Path(__file__).parents[3]
EXAMPLES = {path.name[:2]: path for path in sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))}
TINY = "tinkex/tiny"


class Ran(NamedTuple):
    """What an example wrote, and the names it left behind."""

    out: str
    err: str
    names: dict[str, Any]


Run = Callable[..., Ran]


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("examples") / "data") as server:
        yield server


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the tests' own where the user's home would be."""
    home = tmp_path_factory.mktemp("home")
    return {"TINKEX_CACHE_DIR": str(home / "cache"), "XDG_CONFIG_HOME": str(home / "config")}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folders: dict[str, str]) -> Run:
    """Runs an example in this process, where the large libraries are loaded once for all of them."""

    def example(number: str, url: str, *arguments: str, key: str = "tml-examples") -> Ran:
        for name, value in {**folders, "TINKER_BASE_URL": url, "TINKER_API_KEY": key}.items():
            monkeypatch.setenv(name, value)
        path = EXAMPLES[number]
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        names = runpy.run_path(str(path), run_name="__main__")
        written = capfd.readouterr()
        assert "Traceback" not in written.err
        return Ran(written.out, written.err, names)

    return example
