"""Throw-away environments with the official client, one per release, kept in the checkout's cache.

python -m tests.compat.conformance.environments 0.36.0
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".cache" / "official"
RELEASES = ("0.4.1", "0.24.1", "0.25.0", "0.30.4", "0.36.0")


def python_of(release: str) -> Path:
    """The interpreter of an environment that has this release; made if it is not there."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes side by side want the same one
        return _made(release)


def _made(release: str) -> Path:
    folder = CACHE / release
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"making an environment with tinker {release}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        packages = [f"tinker=={release}", "numpy"]
        # Old releases import torch whether it is needed or not.
        packages += ["torch"] if tuple(map(int, release.split("."))) < (0, 9) else []
        words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*words, "--constraint", str(ROOT / "constraints.txt"), *packages], check=True)
        ready.touch()
    return python


def bare_environ(**extra: str) -> dict[str, str]:
    """Nothing of ours: no settings, no paths."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
    return {**kept, "TINKER_TELEMETRY": "0", **extra}


if __name__ == "__main__":
    for name in sys.argv[1:] or RELEASES:
        print(name, python_of(name))
