"""Builds the C kernels: `make kernels` runs this file, and so does the hook of the package's build (hatch_build.py).

The library is freestanding: it calls no libc and gets OpenMP's functions as pointers, so one build loads beside any
libc. It carries the digest of its sources; `binding` does not use a library that was built from other sources.

Uses the standard library alone: it runs before anything is installed. Why it is so: docs/decisions/kernels.md.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SOURCES = ("decode.c", "norm_rope_gate.c", "lora.c")

FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fwrapv",
         "-fno-stack-protector", "-Wall", "-Wextra")  # fmt: skip
NO_MEMSET = {"gcc": "-fno-tree-loop-distribute-patterns", "clang": "-fno-builtin"}
"""Keeps the compiler from turning loops into calls of memset or memcpy, which a freestanding library lacks."""

X86 = {
    # AVX-512 has 32 registers of 16 numbers, AVX2 has 16 of 8.
    "avx512": ("-mavx512f", "-mfma", "-DLANES=16", "-DWIDE=2", "-DTILE=12", "-DLORA_ROWS=4", "-DLORA_RANKS=8"),
    "avx2": ("-mavx2", "-mfma", "-DLANES=8", "-DWIDE=2", "-DTILE=6", "-DLORA_ROWS=2", "-DLORA_RANKS=4"),
}
ARM = {
    # 32 registers of 4 numbers; a panel is one cache line. Chosen on paper: no such machine was at hand to measure.
    "neon": ("-DLANES=4", "-DWIDE=4", "-DTILE=6", "-DLORA_ROWS=4", "-DLORA_RANKS=8"),
}
ELF = ("-nostdlib", "-s", "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,--no-undefined")
MAC = ("-mmacosx-version-min=11.0",)


class BuildTarget(NamedTuple):
    """A kind of machine."""

    variants: Mapping[str, Sequence[str]]
    """Processor variant → its flags, the fastest first."""
    link: Sequence[str]
    zig: str
    """The machine as zig names it. Its glibc version does not matter: the library uses none."""
    wheel: str
    """Platform tag of a wheel that holds this library."""


TARGETS = {
    "x86_64-linux": BuildTarget(X86, ELF, "x86_64-linux-gnu", "manylinux_2_17_x86_64.musllinux_1_1_x86_64"),
    "aarch64-linux": BuildTarget(ARM, ELF, "aarch64-linux-gnu", "manylinux_2_17_aarch64.musllinux_1_1_aarch64"),
    "x86_64-macos": BuildTarget(X86, MAC, "x86_64-macos.11.0", "macosx_11_0_x86_64"),
    "aarch64-macos": BuildTarget(ARM, MAC, "aarch64-macos.11.0", "macosx_11_0_arm64"),
}


class BuildError(Exception):
    """No library could be built; says why."""


def this_machine() -> str:
    """Return the name of this machine's target, which need not be one of `TARGETS`."""
    machine, system = platform.machine().lower(), {"darwin": "macos"}.get(sys.platform, sys.platform)
    if sys.maxsize < 2**32:
        machine += "-32-bit"
    return f"{ {'amd64': 'x86_64', 'arm64': 'aarch64'}.get(machine, machine) }-{system}"


def wanted_target() -> str | None:
    """Return the target to build for, or None for none: what `TINKEX_KERNELS` says, else this machine."""
    name = os.environ.get("TINKEX_KERNELS") or this_machine()  # border: a setting of the build, not of the product
    if name in TARGETS or name == "none" or name == this_machine():
        return name if name in TARGETS else None
    raise BuildError(f"TINKEX_KERNELS={name}: choose one of {', '.join(TARGETS)}, none")


def library_path(target: str) -> Path:
    """Return where the library of a target belongs.

    The machine is in its name, since a checkout may be shared between machines. It does not end in .so: tools that walk
    through a package take such a file for a Python module.
    """
    return HERE / f"kernels_{target.replace('-', '_')}.lib"


def source_digest() -> str:
    """Return a digest of all that decides what the library computes."""
    files = [HERE / name for name in (*SOURCES, "kernels.h", Path(__file__).name)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def compilers(target: str) -> Iterator[list[str]]:
    """Yield the commands that may compile for a target and work: $CC, cc, gcc, clang, and zig if pip installed it."""
    own = ("cc", "gcc", "clang") if target == this_machine() else ()
    for words in (os.environ.get("CC", ""), *own):  # border: a setting of the build, not of the product
        command = shlex.split(words)
        if command and shutil.which(command[0]) and _works(command):
            yield command
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "cc", "-target", TARGETS[target].zig]


def _works(command: Sequence[str]) -> bool:
    """Whether it compiles at all: on a Mac without developer tools, `cc` is there and only offers to install them."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-x", "c", "-c", "-", "-o", f"{folder}/empty.o"]
        return subprocess.run([*command, *arguments], input=b"int x;", capture_output=True).returncode == 0


def compile_objects(target: str, command: Sequence[str], folder: str, *flags: str) -> list[str]:
    """Compile every source for every variant of a target, and return the paths of the object files."""
    version = _run([*command, "--version"], folder)
    common = [*FLAGS, NO_MEMSET["clang" if "clang" in version else "gcc"], f'-DDIGEST="{source_digest()}"', *flags]
    if TARGETS[target].link is MAC:
        common += MAC
    jobs = []
    for source in SOURCES:
        for variant, variant_flags in TARGETS[target].variants.items():
            arguments = [*common, *variant_flags, f"-DVARIANT={variant}", "-c", str(HERE / source)]
            jobs.append([*command, *arguments, "-o", f"{folder}/{Path(source).stem}_{variant}.o"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: _run(job, folder), jobs))
    return [job[-1] for job in jobs]


def build(target: str, path: Path, commands: Iterable[list[str]] | None = None) -> str:
    """Build a target's library with the first compiler that can, write it to `path`, and return the compiler's name."""
    errors = []
    for command in compilers(target) if commands is None else commands:
        name = "zig" if "ziglang" in command else shlex.join(command)
        try:
            with tempfile.TemporaryDirectory() as folder:
                objects = compile_objects(target, command, folder)
                _run([*command, "-shared", *TARGETS[target].link, *objects, "-o", f"{folder}/library"], folder)
                # Written whole or not at all: an engine may have the file before it open.
                shutil.copyfile(f"{folder}/library", path.with_suffix(".new"))
                os.replace(path.with_suffix(".new"), path)
            return name
        except BuildError as error:
            errors.append(f"{name}: {error}")
    raise BuildError("\n".join(errors) or f"no C compiler for {target} (install gcc or clang, or pip install ziglang)")


def _run(command: Sequence[str], folder: str) -> str:
    """Run in a temporary folder, because zig leaves an empty file where it runs. Returns what was printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr.strip()[-2000:] or f"exit code {done.returncode}")
    return done.stdout


def main() -> None:
    try:
        target = wanted_target()
        if target is None:
            raise BuildError(f"there are no kernels for {this_machine()}, only for {', '.join(TARGETS)}")
        path = library_path(target)
        print(f"{path.name}: built with {build(target, path)}, {path.stat().st_size:,} bytes")
    except BuildError as error:
        sys.exit(f"Cannot build the kernels: {error}")


if __name__ == "__main__":
    main()
