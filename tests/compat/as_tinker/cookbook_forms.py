"""How programs import and name `tinker`: found in source text, kept as data, tried against the alias on every run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

RECORDED = Path(__file__).with_name("cookbook_forms.json")


def write(packages: Iterable[Path]) -> None:
    """Record the forms that the source files of some packages use."""
    forms = {form for package in packages for path in package.rglob("*.py") for form in forms_in(path.read_text())}
    RECORDED.write_text(json.dumps(sorted(forms), indent=1) + "\n")


def recorded() -> list[str]:
    return list(json.loads(RECORDED.read_text()))


def forms_in(source: str) -> Iterator[str]:
    """Import statements as they would be written alone, and attribute paths such as `tinker.types.Datum`."""
    tree = ast.parse(source)
    names: dict[str, str] = {}  # what a name in this file stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_tinker(alias.name):
                    yield f"import {alias.name}"
                    names[alias.asname or "tinker"] = alias.name if alias.asname else "tinker"
        elif isinstance(node, ast.ImportFrom) and node.module and is_tinker(node.module) and not node.level:
            for alias in node.names:
                yield f"from {node.module} import {alias.name}"
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := dotted(node)):
            first, _, rest = path.partition(".")
            if first in names:
                yield f"{names[first]}.{rest}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a quoted annotation
            yield from re.findall(r"^tinker(?:\.\w+)+$", node.value)


def is_tinker(module: str) -> bool:
    return module == "tinker" or module.startswith("tinker.")


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` as text; None if there is anything but names in it."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return f"{front}.{node.attr}" if front else None
    return None
