"""Environments with the official client, one per release, kept in the checkout's `.cache`.

python -m tests.compat.conformance.environments          # make all of them
python -m tests.compat.conformance.environments 0.36.0   # make one
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".cache" / "official"
RELEASES = ("0.4.1", "0.24.1", "0.25.0", "0.30.4", "0.36.0")


def python_of(release: str) -> Path:
    """Return the interpreter of the environment with this release. `make prepare` makes it: tests install nothing."""
    if not _ready(release).exists():
        raise AssertionError(
            f"There is no environment with tinker {release}. Run `make prepare` (newest release) or "
            "`python -m tests.compat.conformance.environments` (all releases)."
        )
    return _python(release)


def make(release: str) -> Path:
    """Make the environment with this release if it is not there, and return its interpreter. Needs the network."""
    python = _python(release)
    if not _ready(release).exists():
        print(f"Making an environment with tinker {release}.", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(CACHE / release)], check=True)
        packages = [f"tinker=={release}", "numpy"]
        # Old releases import torch whether it is needed or not.
        packages += ["torch"] if tuple(map(int, release.split("."))) < (0, 9) else []
        words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*words, "--constraint", str(ROOT / "constraints.txt"), *packages], check=True)
        _ready(release).touch()
    return python


def _python(release: str) -> Path:
    return CACHE / release / "bin" / "python"


def _ready(release: str) -> Path:
    """Return the file that exists once everything is installed."""
    return CACHE / release / ".ready"


def bare_environ(**extra: str) -> dict[str, str]:
    """Nothing of ours: no settings, no paths."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
    return {**kept, "TINKER_TELEMETRY": "0", **extra}


if __name__ == "__main__":
    for name in sys.argv[1:] or RELEASES:
        print(name, make(name))
