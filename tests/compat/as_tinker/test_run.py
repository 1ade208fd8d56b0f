"""`python -m tinkex.as_tinker script.py …` starts a program as Python itself would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TELL = """
import json, sys
import neighbour
def main(steps: int): ...
if "--fail" in sys.argv:
    sys.exit(3)
told = {"argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "package": __package__}
told["main"] = sys.modules["__main__"].__dict__ is globals()
told["annotations"] = str(main.__annotations__)
print(json.dumps(told))
"""

USE = """
import json, multiprocessing, subprocess, sys
import tinker
from tinker import types

def length(prompt):
    return tinker.__version__, tinker.ModelInput is types.ModelInput, prompt.length

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(length, (tinker.ModelInput.from_ints([1, 2, 3]),))
    code = "import importlib.metadata, tinker.types; print(tinker.__version__, importlib.metadata.version('tinker'))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(json.dumps([spawned, child.stdout.split()]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "program.py").write_text(TELL)
    (tmp_path / "use.py").write_text(USE)
    return tmp_path


def run(cwd: Path, *arguments: str, code: int = 0, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, env=os.environ | environ, timeout=60
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def told(cwd: Path, *arguments: str) -> Any:
    return json.loads(run(cwd, *arguments))


def test_a_script_runs_as_under_plain_python(folder: Path) -> None:
    script = os.path.join(folder.name, "program.py")
    plain = told(folder.parent, script, "--lr", "1")
    assert told(folder.parent, "-m", "tinkex.as_tinker", script, "--lr", "1") == plain
    assert plain["argv"] == [script, "--lr", "1"]


def test_a_module_runs_as_under_plain_python(folder: Path) -> None:
    plain = told(folder, "-m", "program", "-x")
    assert told(folder, "-m", "tinkex.as_tinker", "-m", "program", "-x") == plain


def test_a_scripts_exit_code_is_passed_on(folder: Path) -> None:
    run(folder, "-m", "tinkex.as_tinker", "program.py", "--fail", code=3)


def test_a_missing_script_gives_the_error_of_python(folder: Path) -> None:
    assert "can't open file" in run(folder, "-m", "tinkex.as_tinker", "nowhere.py", code=2)


@pytest.mark.parametrize("arguments", [(), ("-m",), ("-c", "pass")])
def test_a_wrong_call_prints_the_usage(folder: Path, arguments: tuple[str, ...]) -> None:
    assert run(folder, "-m", "tinkex.as_tinker", *arguments, code=2).startswith("usage:")


@pytest.mark.slow
def test_spawned_and_child_processes_of_a_script_find_tinker_too(folder: Path) -> None:
    spawned, child = told(folder, "-m", "tinkex.as_tinker", "use.py")
    assert spawned == ["0.36.0", True, 3]
    assert child == ["0.36.0", "0.36.0"]


@pytest.mark.slow
def test_processes_spawned_by_a_program_that_called_install_find_tinker_too(folder: Path) -> None:
    (folder / "work.py").write_text("import tinker\ndef version():\n    return tinker.__version__\n")
    (folder / "start.py").write_text(
        "if __name__ == '__main__':\n"
        "    import multiprocessing, tinkex.as_tinker\n"
        "    tinkex.as_tinker.install()\n"
        "    import work\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(work.version))\n"
    )
    assert run(folder, "start.py").strip() == "0.36.0"


@pytest.mark.slow
def test_a_script_uses_the_alias_even_if_the_real_package_is_installed(folder: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "tinker").mkdir(parents=True)
    (site / "tinker" / "__init__.py").write_text("raise RuntimeError('the real one')")
    output = run(folder, "-m", "tinkex.as_tinker", "use.py", PYTHONPATH=str(site))
    assert json.loads(output)[1] == ["0.36.0", "0.36.0"]
