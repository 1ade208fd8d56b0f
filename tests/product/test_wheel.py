"""The wheel works as users install it: in an environment with nothing else, away from the source tree."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import tinkex
from tests.prepare import ROOT, WHEELS

FIRST_STEPS = """
import pkgutil, sys, tinkex
from tinkex.testing import ScriptedService

assert "site-packages" in tinkex.__file__, tinkex.__file__
service = ("tinkex.engine.", "tinkex.server.", "tinkex.store.")  # these need the extra `local`
for found in pkgutil.walk_packages(tinkex.__path__, "tinkex."):
    if not found.name.endswith(("__main__", "pytest_plugin")) and not found.name.startswith(service):
        __import__(found.name)
for name in tinkex.__all__:
    getattr(tinkex, name)
with ScriptedService() as scripted, tinkex.ServiceClient(base_url=scripted.url) as service:
    training = service.create_lora_training_client("tinkex/tiny", rank=4)
    datum = tinkex.Datum(tinkex.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    print(training.forward_backward([datum], "cross_entropy").result().loss)
heavy = {"torch", "transformers", "numpy", "pydantic", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel and its dependencies, which `make prepare` fetched."""
    assert WHEELS.is_dir(), "There are no wheels to install. Run `make prepare` first."
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    commands = home / ("Scripts" if sys.platform == "win32" else "bin")
    offline = ["--quiet", "--no-index", "--find-links", str(WHEELS)]
    run(str(commands / "python"), "-m", "pip", "install", *offline, str(wheel))
    return commands


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    about = f"tinkex-{tinkex.__version__}.dist-info"
    package = [name for name in names if name.parts[0] == "tinkex"]
    assert {name.parts[0] for name in names} == {"tinkex", about}
    assert Path("tinkex/py.typed") in package
    assert Path(f"{about}/licenses/LICENSE") in names
    pages = {name.suffix for name in package if name.parts[1:3] == ("server", "console")}
    assert pages == {".html", ".css", ".js", ".svg"}
    rest = [name for name in package if name.parts[1:3] != ("server", "console")]
    assert {name.suffix for name in rest} == {".py", ".proto", ".typed", ".c", ".h", ".lib"}, (
        "a note or a table came along"
    )
    assert {name.name for name in rest if name.suffix in (".c", ".h", ".lib")} == {
        *("kernels.h", "kernels_step.c", "kernels_between.c", "kernels_deltas.c", "kernels_x86_64_linux.lib")
    }
    tests = [name for name in package if name.name.startswith(("test_", "conftest")) or name.stem.endswith("_test")]
    assert not tests


@pytest.mark.slow
def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "tinkex").rglob("*.py")}
    assert sources <= held


@pytest.mark.slow
def test_the_installed_package_trains_without_any_extra(installed: Path, tmp_path: Path) -> None:
    loss = run(str(installed / "python"), "-I", "-c", FIRST_STEPS, cwd=tmp_path)
    assert float(loss) > 0


@pytest.mark.slow
def test_the_installed_command_prints_its_version(installed: Path, tmp_path: Path) -> None:
    assert run(str(installed / "tinkex"), "version", cwd=tmp_path).startswith(f"tinkex {tinkex.__version__} ")


@pytest.mark.slow
def test_the_installed_package_needs_no_more_than_it_declares(installed: Path) -> None:
    assert "No broken requirements found" in run(str(installed / "python"), "-m", "pip", "check")
