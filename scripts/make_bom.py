"""Writes bom.cdx.json, the bill of materials (CycloneDX 1.6) of the pinned packages, and checks their licences.

    make_bom.py           # write it
    make_bom.py --check   # compare, as `make check` does
    make_bom.py --audit   # ask pip-audit about known vulnerabilities; says so if its service cannot be asked

Names and releases come from pins.txt and constraints.txt, licences and dependencies from what is installed. A package
that this machine does not have keeps the licence that the file has. Why no tool: docs/decisions/dependencies.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tinkex._version import __version__

ROOT = Path(__file__).resolve().parent.parent
BOM = ROOT / "bom.cdx.json"
AUDIT_S = 120

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "LLVM-exception",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    "PSF-2.0",
    "Zlib",
}
EXCEPTIONS = {
    "codespell": "GPL-2.0-only: a tool that is run on the sources; nothing of it is imported or shipped",
    "docutils": "public domain, BSD, and one file under the GPL (an Emacs mode); builds the documents only",
    "psycopg": "LGPL-3.0-only: imported as it is, by the extra `postgres` alone",
    "psycopg-binary": "LGPL-3.0-only: as psycopg",
}
"""Package → why it may be used with a licence that is not allowed."""
WORDS = {
    "MIT License": "MIT",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "GNU General Public License (GPL)": "GPL",
    "Public Domain": "LicenseRef-public-domain",
}
"""What older packages write → the SPDX name."""


def pinned() -> dict[str, str]:
    """Return name → release of every pinned package."""
    lines = [*(ROOT / "pins.txt").read_text().splitlines(), *(ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==\S+", line)]
    return {canonicalize_name(name): release for name, release in sorted(pairs, key=lambda pair: pair[0].lower())}


def licence_of(name: str) -> str | None:
    """Return the licence of an installed package as an SPDX expression; None if it is not installed."""
    try:
        about: Any = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or [] if "License ::" in line]
    words = [word for word in classifiers if word != "OSI Approved"] or [(about.get("License") or "").strip()]
    return " AND ".join(WORDS.get(word, word) for word in words)


def needed_by(requirements: Iterable[str]) -> set[str]:
    """Return the names of packages that these requirements need, directly or through others, as far as installed."""
    names: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in names:
            continue
        names.add(name)
        try:
            below = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in map(Requirement, below):
            extras = requirement.extras or {""}
            if line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(line)
    return names


def document() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = needed_by(project["dependencies"])
    optional = needed_by(line for extra in extras if extra != "dev" for line in extras[extra])
    before = {entry["name"]: entry for entry in json.loads(BOM.read_text())["components"]} if BOM.exists() else {}
    components = []
    for name, release in pinned().items():
        old = before.get(name, {})
        licence = licence_of(name)
        if licence is None:
            licence = old["licenses"][0]["expression"] if old else "NOASSERTION"
        components.append(
            {
                "type": "library",
                "name": name,
                "version": release,
                "purl": f"pkg:pypi/{name}@{release}",
                # `excluded` is CycloneDX's word for what is used in development only.
                "scope": "required" if name in required else "optional" if name in optional else "excluded",
                "licenses": [{"expression": licence}],
            }
        )
    about = {"type": "library", "name": "tinkex", "version": __version__, "purl": f"pkg:pypi/tinkex@{__version__}"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**about, "licenses": [{"expression": project["license"]}]}},
        "components": components,
    }


def rejected_licences(components: Iterable[dict[str, Any]]) -> list[str]:
    """Return a sentence for each package whose licence is not allowed."""
    sentences = []
    for entry in components:
        expression = entry["licenses"][0]["expression"]
        if entry["name"] not in EXCEPTIONS and not is_allowed(expression):
            sentences.append(f"{entry['name']} {entry['version']} has the licence {expression!r}, which is not allowed")
    return sentences


def is_allowed(expression: str) -> bool:
    """Return whether every licence in an SPDX expression is allowed. (`OR` would need only one.)"""
    names = set(re.findall(r"[\w.+-]+", expression)) - {"AND", "OR", "WITH"}
    return bool(names) and names <= ALLOWED


def audit() -> int:
    """Run pip-audit over the pins. Returns 1 for a known vulnerability; not being able to ask is no failure."""
    sys.path.insert(0, str(ROOT))
    from tests import tools

    try:
        tool = tools.make("pip-audit").with_name("pip-audit")
        words = ["-r", "pins.txt", "--no-deps", "--disable-pip", "--timeout", "10", "--format", "json"]
        done = subprocess.run([tool, *words], cwd=ROOT, capture_output=True, text=True, timeout=AUDIT_S, check=False)
        packages = json.loads(done.stdout)["dependencies"]
    except (tools.ToolMissing, subprocess.SubprocessError, OSError, ValueError):
        packages = []
    # Where only a mirror is reached, pip-audit passes over every package and reports that it found nothing.
    audited = [package for package in packages if "vulns" in package]
    if not audited:
        print("Audit: the service that knows vulnerabilities cannot be asked from here. Nothing was audited.")
        return 0
    vulnerable = [package for package in audited if package["vulns"]]
    for package in vulnerable:
        names = ", ".join(entry["id"] for entry in package["vulns"])
        print(f"Audit: {package['name']} {package['version']} has {names}.", file=sys.stderr)
    print(f"Audit: {len(audited)} of {len(pinned())} packages asked about, {len(vulnerable)} vulnerable.")
    return 1 if vulnerable else 0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--audit", action="store_true")
    options = parser.parse_args(words)
    if options.audit:
        return audit()
    made = document()
    text = json.dumps(made, indent=1) + "\n"
    problems = rejected_licences(made["components"])
    if not options.check:
        BOM.write_text(text, encoding="utf-8")
    elif not BOM.exists() or BOM.read_text(encoding="utf-8") != text:
        problems.append("bom.cdx.json is not up to date: run scripts/make_bom.py")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
