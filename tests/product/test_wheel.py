"""The wheel works as users install it: with its declared dependencies alone, away from the source tree.

No network: the wheel is built with the hatchling of this environment, and the dependencies are copied from it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

import tinkex
from tinkex.engine.packed.kernels import build

ROOT = Path(__file__).parents[2]
TARGET = build.this_machine()
LIBRARY = build.library_path(TARGET).name
with_compiler = pytest.mark.skipif(
    TARGET not in build.TARGETS or next(build.compilers(TARGET), None) is None, reason="no C compiler for this machine"
)

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
    """The folder of commands of an environment that has the wheel and what it declares to need, and nothing else."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    commands = home / ("Scripts" if sys.platform == "win32" else "bin")
    python = str(commands / "python")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, str(wheel))
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    (about,) = site.glob("tinkex-*.dist-info")
    for name in declared(importlib.metadata.Distribution.at(about)):
        copy(name, site)
    return commands


def declared(distribution: importlib.metadata.Distribution) -> set[str]:
    """The names of all that a distribution needs without any extra, and what those need."""
    names = set()
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names |= {requirement.name} | declared(importlib.metadata.distribution(requirement.name))
    return names


def copy(name: str, site: Path) -> None:
    for file in importlib.metadata.distribution(name).files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), site / file)


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
    assert {name.suffix for name in rest} - {".lib"} == {".py", ".proto", ".typed", ".c", ".h"}, (
        "a note or a table came along"
    )
    assert {name.name for name in rest if name.suffix in (".c", ".h")} == {*build.SOURCES, "kernels.h"}
    tests = [name for name in package if name.name.startswith(("test_", "conftest")) or name.stem.endswith("_test")]
    assert not tests


@pytest.mark.slow
@with_compiler
def test_the_wheel_brings_the_kernels_for_this_machine_and_says_so_in_its_tag(wheel: Path, tmp_path: Path) -> None:
    _, _, _, tags = parse_wheel_filename(wheel.name)
    assert tags & set(sys_tags()), "it does not install here"
    assert {tag.interpreter for tag in tags} == {"py3"}
    assert {tag.platform for tag in tags} == set(build.TARGETS[TARGET].wheel.split("."))
    archive = zipfile.ZipFile(wheel)
    assert [Path(name).name for name in archive.namelist() if name.endswith(".lib")] == [LIBRARY]
    library = ctypes.CDLL(archive.extract(f"tinkex/engine/packed/kernels/{LIBRARY}", tmp_path))
    for variant in build.TARGETS[TARGET].variants:
        digest = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, f"digest_{variant}")))
        assert digest.decode() == build.source_digest()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("readelf") is None or sys.platform != "linux", reason="reads ELF with readelf")
@with_compiler
def test_the_library_needs_no_other_library(wheel: Path, tmp_path: Path) -> None:
    """So that it loads beside any libc, as the tags of the wheel claim: manylinux and musllinux."""
    library = zipfile.ZipFile(wheel).extract(f"tinkex/engine/packed/kernels/{LIBRARY}", tmp_path)
    said = run("readelf", "--wide", "--dynamic", "--dyn-syms", library)
    assert "NEEDED" not in said
    undefined = [line for line in said.splitlines() if " UND " in line and not line.rstrip().endswith("UND")]
    assert not undefined


@pytest.mark.slow
def test_without_the_kernels_the_wheel_is_for_any_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_KERNELS", "none")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (built,) = tmp_path.glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".lib")]


@pytest.mark.slow
def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "tinkex").rglob("*.py")}
    assert sources <= packed


@pytest.mark.slow
def test_the_installed_package_trains_without_any_extra(installed: Path, tmp_path: Path) -> None:
    loss = run(str(installed / "python"), "-I", "-c", FIRST_STEPS, cwd=tmp_path)
    assert float(loss) > 0


@pytest.mark.slow
def test_the_installed_command_prints_its_version(installed: Path, tmp_path: Path) -> None:
    assert run(str(installed / "tinkex"), "version", cwd=tmp_path).startswith(f"tinkex {tinkex.__version__} ")


@pytest.mark.slow
def test_the_installed_package_needs_no_more_than_it_declares(installed: Path) -> None:
    said = run(sys.executable, "-m", "pip", "--python", str(installed / "python"), "check")
    assert "No broken requirements found" in said
