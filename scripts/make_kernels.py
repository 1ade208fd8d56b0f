"""Builds the kernels of `engine/packed` for x86-64 Linux, with gcc: `python scripts/make_kernels.py`.

What it writes is part of the package: users need no compiler. The library carries the digest of its sources and of this
file, so that a test notices when one was changed without the other; with the same gcc another build has the same bytes.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

PLACE = Path(__file__).resolve().parent.parent / "src" / "tinkex" / "engine" / "packed" / "kernels"
SOURCES = [PLACE / name for name in ("decode.c", "norm_rope_gate.c", "lora.c")]
HEADER = PLACE / "kernels.h"
TARGET = PLACE / "kernels_x86_64_linux.lib"
"""Not `.so`: whoever walks through the package would take that for a module of Python."""

GCC = "12.2.0"
"""What built the library that is shipped."""

FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fwrapv", "-fno-tree-loop-distribute-patterns", "-fno-stack-protector", "-Wall", "-Wextra", "-Werror"]
VARIANTS = {
    # Registers: 32 of 16 numbers, and 16 of 8.
    "avx512": ["-mavx512f", "-mfma", "-DLANES=16", "-DWIDE=2", "-DTILE=12"],
    "avx2": ["-mavx2", "-mfma", "-DLANES=8", "-DWIDE=2", "-DTILE=6"],
}


def digest() -> str:
    files = [*SOURCES, HEADER, Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def main(target: Path = TARGET) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for source in SOURCES:
            for name, flags in VARIANTS.items():
                parts.append(f"{folder}/{source.stem}_{name}.o")
                given = [f"-DVARIANT={name}", f'-DDIGEST="{digest()}"', "-c", str(source), "-o", parts[-1]]
                subprocess.run(["gcc", *FLAGS, *flags, *given], check=True)
        # No start-up files and no library: what it calls is handed to it, so it loads beside any libc.
        words = ["gcc", "-shared", "-nostdlib", "-s", "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,--no-undefined"]
        subprocess.run([*words, *parts, "-o", str(target)], check=True)
    print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:2]))
