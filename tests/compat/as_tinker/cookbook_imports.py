"""Imports every module of tinker-cookbook twice: with the official `tinker`, and through `tinkex.as_tinker`.

    python tests/compat/as_tinker/cookbook_imports.py [folder for the environment]

One throw-away environment holds the cookbook, its dependencies and this package; the official package lies in a folder
beside it and joins by PYTHONPATH, so that the two runs differ in nothing else. Writes `cookbook_imports.md` (what
imported) and `cookbook_forms.json` (how the cookbook imports and names `tinker`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

if __package__:
    from . import cookbook_forms
else:  # run as a script
    import cookbook_forms  # type: ignore[no-redef]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COOKBOOK = "tinker-cookbook==0.5.8"
OFFICIAL = "tinker==0.36.0"
RENDERERS = "tml-renderers==0.2.1"
REPORT = HERE / "cookbook_imports.md"
ENVIRONMENT = ROOT / ".cache" / "cookbook"
LIMIT_S = 60
"""A module takes a second or two; one that still runs after this does work at import."""


class Outcome(NamedTuple):
    """Why a module did not import; "" if it did."""

    official: str
    alias: str


def main(place: Path) -> int:
    python = make(place)
    packages = place / "packages.json"
    outcomes = run(place, python)
    REPORT.write_text(report(outcomes))
    cookbook_forms.write(Path(path) for path in json.loads(packages.read_text()).values())
    print(REPORT.read_text())
    return 1 if lost(outcomes) else 0


def lost(outcomes: dict[str, Outcome]) -> list[str]:
    """The modules that import with the official package and not through the alias."""
    return [f"{name}: {seen.alias}" for name, seen in outcomes.items() if seen.alias and not seen.official]


def python_of(place: Path) -> Path:
    """Return the interpreter of the environment. Tests do not make it: they install nothing."""
    if not (place / "packages.json").is_file():
        raise AssertionError(f"There is no environment with {COOKBOOK}. Run `python -m tests.prepare --full` first.")
    return place / "venv" / "bin" / "python"


def make(place: Path) -> Path:
    """Make the environment if it is not there (some hundred MB, mostly torch) and return its interpreter."""
    python = place / "venv" / "bin" / "python"
    ready = place / "packages.json"

    def pip(*arguments: str) -> None:
        options = ["--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([python, "-m", "pip", "install", *options, *arguments], check=True)

    if ready.is_file():
        pip("--editable", str(ROOT))  # its dependencies may have changed since
        return python
    print(f"Making an environment with {COOKBOOK} (a few minutes).", flush=True)
    venv.create(place / "venv", with_pip=True, clear=True)
    pip("--no-deps", COOKBOOK, RENDERERS)
    pip("--no-deps", "--target", str(place / "official"), OFFICIAL)
    needed = [*requirements(python, "tinker-cookbook"), *requirements(python, "tinker", place / "official"), "pytest"]
    pip("--editable", str(ROOT), *(line for line in needed if not re.match(r"(tinker|tml-renderers)\b(?!-)", line)))
    site = next((place / "venv").glob("lib/python*/site-packages"))
    ready.write_text(json.dumps({name: str(site / name) for name in ("tinker_cookbook", "tml_renderers")}))
    return python


def requirements(python: Path, package: str, folder: Path | None = None) -> list[str]:
    """What a package needs, with all its extras."""
    code = f"import importlib.metadata as m; print(*m.requires({package!r}) or (), sep='\\n')"
    environ = os.environ | ({"PYTHONPATH": str(folder)} if folder else {})
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, env=environ)
    lines = [line.partition("; extra ==") for line in done.stdout.splitlines()]
    return [needed for needed, _, extra in lines if not extra or "'all'" in extra]


def modules(package: Path) -> list[str]:
    names = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def run(place: Path, python: Path) -> dict[str, Outcome]:
    names = modules(Path(json.loads((place / "packages.json").read_text())["tinker_cookbook"]))
    official = attempt(python, names, {"PYTHONPATH": str(place / "official")})
    alias = attempt(python, names, {"COOKBOOK_THROUGH_ALIAS": "1"})
    return {name: Outcome(official[name], alias[name]) for name in names}


def attempt(python: Path, names: list[str], environ: dict[str, str]) -> dict[str, str]:
    """Import each module in a process of its own, forked from one that has loaded what is large and common."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "PYTHON"))}
    offline = {"HF_HUB_OFFLINE": "1", "TINKER_BASE_URL": "http://127.0.0.1:9", "TINKER_API_KEY": "tml-nobody"}
    done = subprocess.run(
        [python, str(HERE / "import_each.py")],
        input=json.dumps({"modules": names, "limit_s": LIMIT_S}),
        env=clean | offline | environ,
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"importing the cookbook's modules broke down:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def report(outcomes: dict[str, Outcome]) -> str:
    failed = {name: seen for name, seen in outcomes.items() if seen.official or seen.alias}
    both = len(outcomes) - len(failed)
    only_official = [name for name, seen in failed.items() if not seen.official]
    only_alias = [name for name, seen in failed.items() if not seen.alias]
    neither = {name: seen for name, seen in failed.items() if seen.official and seen.alias}
    python = ".".join(map(str, sys.version_info[:2]))
    lines = [
        f"# {COOKBOOK.replace('==', ' ')}, module by module",
        "",
        "Written by `make cookbook`. Each module was imported in a process of its own, unmodified, once with the",
        f"official {OFFICIAL.replace('==', ' ')} and once with `tinkex.as_tinker` and no `tinker` installed.",
        f"Python {python}, all dependencies and the cookbook's extra `all`, no network.",
        "",
        "| modules | count |",
        "|---|---:|",
        f"| in the wheel | {len(outcomes)} |",
        f"| import with both | {both} |",
        f"| import with the official package only | {len(only_official)} |",
        f"| import through tinkex only | {len(only_alias)} |",
        f"| import with neither | {len(neither)} |",
    ]
    lines += ["", *section("With the official package only", {name: failed[name].alias for name in only_official})]
    lines += section("With neither, and why", {name: seen.official for name, seen in neither.items()})
    other = {name: seen for name, seen in neither.items() if seen.official != seen.alias}
    lines += section("Of these, for another reason through tinkex", {name: seen.alias for name, seen in other.items()})
    return "\n".join(lines).rstrip() + "\n"


def section(title: str, reasons: dict[str, str]) -> Iterable[str]:
    if not reasons:
        return []
    rows = [f"| `{name}` | {reason.replace('|', chr(92) + '|')} |" for name, reason in reasons.items()]
    return [f"## {title}", "", "| module | reason |", "|---|---|", *rows, ""]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ENVIRONMENT))
