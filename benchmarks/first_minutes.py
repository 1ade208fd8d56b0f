"""How long a newcomer waits: `make demo`, then `make test`, in a fresh clone with empty caches and an empty home.

    python -m benchmarks.first_minutes          (half an hour; writes benchmarks/results/first_minutes.md)

Commits are cloned, not the working tree. Of this machine, Python, make and what apt-get installed are used.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.client_cost import commit, cpu_model

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "first_minutes.md"
KEPT = re.compile(r"PATH|LANG|PIP_\w+|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|\w+_proxy", re.IGNORECASE)
"""What of the environment a newcomer would have too: where programs and packages are."""


def size_mb(folder: Path) -> float:
    found = 0
    for place, _, names in os.walk(folder):
        found += sum(os.lstat(os.path.join(place, name)).st_size for name in names)
    return found / 1e6


def timed(words: list[str], folder: Path, environ: dict[str, str], log: Path) -> tuple[int, float, str]:
    """Exit code, seconds, output."""
    started = time.perf_counter()
    with log.open("w") as out:
        code = subprocess.run(words, cwd=folder, env=environ, stdout=out, stderr=subprocess.STDOUT).returncode
    return code, time.perf_counter() - started, log.read_text(errors="replace")


def minutes(seconds: float) -> str:
    return f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def main() -> int:
    with tempfile.TemporaryDirectory() as base:
        place, home = Path(base) / "clone", Path(base) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(place)], check=True)
        shared = ROOT.parent / "shared"
        if shared.is_dir():
            (Path(base) / "shared").symlink_to(shared)
        environ = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)} | {"HOME": str(home)}
        setup = timed(["make", ".venv/.local"], place, environ, Path(base) / "setup.log")
        env_mb = size_mb(place / ".venv")
        pull = timed([".venv/bin/tinkex", "models", "pull", "smollm2-135m"], place, environ, Path(base) / "pull.log")
        demo = timed(["make", "demo"], place, environ, Path(base) / "demo.log")
        home_mb = size_mb(home)
        test = timed(["make", "test"], place, environ, Path(base) / "test.log")
        full_mb = size_mb(place / ".venv")
    steps = {"environment": setup, "model": pull, "make demo": demo, "make test": test}
    failed = [name for name, (code, _, _) in steps.items() if code]
    for name in failed:
        print(f"{name} failed:\n{steps[name][2][-3000:]}", file=sys.stderr)
    trained = re.findall(r"steps · loss .*", demo[2])
    right = re.findall(r"\d+ of \d+ right before, \d+ of \d+ after", demo[2])
    tests = re.findall(r"\d+ passed.*", test[2])
    RESULTS.write_text(
        f"""# The first minutes

Written by `python -m benchmarks.first_minutes` on {dt.date.today().isoformat()}: {os.cpu_count()} cores, {cpu_model()},
Python {sys.version.split()[0]}, commit {commit()}. A fresh clone, an empty home, empty caches.

| what | time | afterwards on disk |
|---|---|---|
| the environment of `make demo` (from PyPI) | {minutes(setup[1])} | {env_mb:,.0f} MB |
| the model (from PyPI) | {minutes(pull[1])} | {home_mb:,.0f} MB with the demo's data |
| `make demo` after the downloads | {minutes(demo[1])} | |
| `make test` with the rest of its environment | {minutes(test[1])} | {full_mb:,.0f} MB |

* training: {trained[-1] if trained else "none"}
* exam: {right[-1] if right else "none"}
* tests: {tests[-1] if tests else "none"}
* failed: {", ".join(failed) or "nothing"}
""",
        encoding="utf-8",
    )
    print(RESULTS.read_text(encoding="utf-8"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
