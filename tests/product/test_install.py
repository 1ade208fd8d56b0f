"""`scripts/install.py`: what a machine lacks is one sentence, and pip's progress is one line."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "scripts" / "install.py"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_can_be_read_by_a_python_that_is_too_old() -> None:
    ast.parse(FILE.read_text(encoding="utf-8"), feature_version=(3, 8))


def test_an_old_python_is_told_which_one_is_needed(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert "3.11 or later is needed and this is 3.9.2" in install.missing(Path("nowhere"))


def test_a_full_disk_is_told_before_anything_is_fetched(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10, 9, 1_000_000_000))
    assert "1.0 GB of disk are left and 3 GB are needed" in install.missing(Path("nowhere"))


def test_this_machine_lacks_nothing(install: ModuleType, tmp_path: Path) -> None:
    assert install.missing(tmp_path) == ""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  Downloading torch-2.13.0+cpu-cp311-linux_x86_64.whl (190.2 MB)\n", "fetching torch (190.2 MB)"),
        ("  Using cached numpy-2.3-cp311.whl (16 kB)\n", "fetching numpy (16 kB)"),
        ("Installing collected packages: a, b, c\n", "installing 3 packages"),
        ("Collecting x>=1\n", ""),
        ("Requirement already satisfied: x in y\n", ""),
    ],
)
def test_pips_lines_become_a_few_words(install: ModuleType, line: str, shown: str) -> None:
    assert install.step(line) == shown


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError: failed to establish", "PyPI cannot be reached"),
        ("something else", "pip failed"),
    ],
)
def test_a_failure_is_told_with_its_cause(install: ModuleType, said: str, cause: str) -> None:
    assert cause in install.explain(said)


def test_releases_that_cannot_be_had_here_are_replaced_by_the_newest(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").touch()
    answers = {"pins.txt": (1, "ERROR: No matching distribution found for x==1"), "constraints.txt": (0, "")}
    monkeypatch.setattr(install, "install", lambda venv, extras, constraints: answers[constraints])
    assert install.main(tmp_path, "local") == 0
    assert "A release of pins.txt cannot be had here" in capsys.readouterr().out


def test_every_tool_and_library_of_the_environment_is_pinned() -> None:
    """Or a release of somebody else's, made overnight, decides whether a change may land."""
    root = FILE.parent.parent
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in (root / "pins.txt").read_text().split("\n")}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["local"], *extras["postgres"]]
    names = {re.split(r"[\[>=;\s]", one)[0].lower().replace("_", "-") for one in wanted}
    assert names - pinned == {"tinkex", "torch"}  # this, and what constraints.txt holds


def test_without_any_compiler_the_kernels_are_left_out(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the machine has no C compiler, the build asks pip for one; an index may have none for this machine."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").touch()
    monkeypatch.setenv("TINKEX_KERNELS", "")
    tried = []

    def pip(venv: Path, extras: str, constraints: str) -> tuple[int, str]:
        tried.append((constraints, os.environ["TINKEX_KERNELS"]))
        return (0, "") if tried[-1][1] == "none" else (1, "ERROR: No matching distribution found for ziglang")

    monkeypatch.setattr(install, "install", pip)
    assert install.main(tmp_path, "local") == 0
    assert tried == [("pins.txt", ""), ("pins.txt", "none")]
    assert "without the C kernels" in capsys.readouterr().out
