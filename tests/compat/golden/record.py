"""Record the golden data anew: `python tests/compat/golden/record.py`.

Builds a throw-away environment for each official release, plays all cases and answers inside it against a recording
server on 127.0.0.1, and writes surface/, requests/ and answers/. Needs the network for pip, and some minutes.
`--environments DIR` keeps the environments there and uses them again.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
VERSIONS = ("0.36.0", "0.4.1")
# 0.4.1 needs torch to import, the later one for custom losses and sparse tensors. Pinned, or pip fetches CUDA as well.
TORCH = "torch==2.13.0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=pathlib.Path, help="folder for the environments; kept")
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder for the data files")
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.environments or pathlib.Path(temporary)
        for version in arguments.versions:
            record(version, environment(folder, version), arguments.output)


def environment(folder: pathlib.Path, version: str) -> pathlib.Path:
    """The interpreter of an environment that has this release."""
    python = folder / version / "bin" / "python"
    if not python.exists():
        print(f"{version}: building an environment", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder / version], check=True)
        packages = [TORCH, f"tinker=={version}", "numpy"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def record(version: str, python: pathlib.Path, output: pathlib.Path) -> None:
    # A fixed hash seed, so that nothing that passes through a set can move; no byte code beside the sources.
    settings = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    for what in ("surface", "requests", "answers"):
        target = output / what / f"{version}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"{version}: {what}", flush=True)
        command: list[str | pathlib.Path] = [python, "-W", "ignore", "-m", "tests.compat.golden.drive", what, target]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | settings)


if __name__ == "__main__":
    main()
