"""How the C kernels are built: without a warning, the same bytes each time, and not at all without a compiler."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tinkex.engine.packed.kernels import binding, build

ROOT = Path(__file__).parents[3]
TARGET = build.this_machine()
COMPILERS = list(build.compilers(TARGET)) if TARGET in build.TARGETS else []
with_compiler = pytest.mark.skipif(not COMPILERS, reason="no C compiler for this machine")


@with_compiler
def test_where_they_can_be_built_they_are_built_and_used() -> None:
    """Else the tests of their numbers would be skipped without a word."""
    if not binding.supported_variants(TARGET):
        pytest.skip("this processor has no variant's registers")
    try:
        binding._load("auto")
    except OSError as error:
        pytest.fail(f"{error} (or install the checkout again)")


@pytest.mark.slow
@with_compiler
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    objects = build.compile_objects(TARGET, COMPILERS[0], str(tmp_path), "-Werror")
    assert len(objects) == len(build.SOURCES) * len(build.TARGETS[TARGET].variants)


@pytest.mark.full
@with_compiler
def test_a_second_build_has_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build.build(TARGET, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@with_compiler
def test_a_compiler_that_fails_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert next(build.compilers(TARGET))[0] != str(broken)


def test_a_build_that_no_compiler_can_do_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "compilers", lambda target: iter(()))
    with pytest.raises(build.BuildError, match="no C compiler for aarch64-linux"):
        build.build("aarch64-linux", tmp_path / "library")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("machine", "platform", "target"),
    [
        ("x86_64", "linux", "x86_64-linux"),
        ("aarch64", "linux", "aarch64-linux"),
        ("arm64", "darwin", "aarch64-macos"),
        ("x86_64", "darwin", "x86_64-macos"),
        ("riscv64", "linux", None),
        ("AMD64", "win32", None),
    ],
)
def test_machines_and_their_targets(
    machine: str, platform: str, target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKEX_KERNELS", raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sys.platform", platform)
    assert build.wanted_target() == target


def test_the_target_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_KERNELS", "none")
    assert build.wanted_target() is None
    monkeypatch.setenv("TINKEX_KERNELS", "aarch64-macos")
    assert build.wanted_target() == "aarch64-macos"
    monkeypatch.setenv("TINKEX_KERNELS", "vax")
    with pytest.raises(build.BuildError, match="TINKEX_KERNELS=vax: choose one of x86_64-linux"):
        build.wanted_target()


# The hook of the package's build


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("hatchling")
    monkeypatch.delenv("TINKEX_KERNELS", raising=False)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hatch_build", module)
    spec.loader.exec_module(module)
    return module


class Log:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def hook_of(module: ModuleType) -> tuple[Any, Log]:
    log = Log()
    return module.KernelsHook(str(ROOT), {}, None, None, "", "wheel", app=log), log


def test_zig_is_asked_for_only_where_there_is_no_compiler(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_hook, _ = hook_of(hook)
    monkeypatch.setattr(hook.kernels, "this_machine", lambda: "x86_64-linux")
    monkeypatch.setattr(hook.kernels, "compilers", lambda target: iter([["cc"]]))
    assert kernels_hook.dependencies() == []
    monkeypatch.setattr(hook.kernels, "compilers", lambda target: iter(()))
    assert kernels_hook.dependencies() == ["ziglang"]
    monkeypatch.setattr(hook.kernels, "this_machine", lambda: "riscv64-linux")
    assert kernels_hook.dependencies() == []


def test_without_a_compiler_the_wheel_is_made_without_the_library(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_hook, log = hook_of(hook)
    monkeypatch.setattr(hook.kernels, "this_machine", lambda: "x86_64-linux")
    monkeypatch.setattr(hook.kernels, "compilers", lambda target: iter(()))
    data: dict[str, object] = {"force_include": {}}
    kernels_hook.initialize("standard", data)
    assert data == {"force_include": {}}
    assert "no C compiler for x86_64-linux" in log.warnings[0]
