"""The borders of the client: no import cycles inside, and nothing private is used outside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "tinkex"
CLIENT = PACKAGE / "client"


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> Iterator[str]:
    """Every import, also those inside functions and for type checkers only: they hide a cycle, they do not break it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module


def test_no_module_of_the_client_imports_itself_through_others() -> None:
    files = {name_of(path): path for path in CLIENT.rglob("*.py")}
    graph = {name: {each for each in imports_of(path, set(files)) if each in files} for name, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" → ".join(reversed(error.args[1]))) from None


def test_nothing_outside_the_client_imports_its_private_modules() -> None:
    modules = {name_of(path) for path in CLIENT.rglob("*")}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if CLIENT not in path.parents and "tinkex.client" in path.read_text()
        for name in imports_of(path, modules)
        if re.match(r"tinkex\.client\.(_|\w+\._)", name)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_outside_the_client_touches_private_attributes_of_its_objects() -> None:
    private = re.compile(r"(?<!self)\._(session|operation|sampling|sampling_session_id|queue|link|core|is_observed)\b")
    rooms = ("cli", "watch", "demo", "terminal", "as_tinker", "local_service", "__init__.py")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for room in rooms
        for path in sorted((PACKAGE / room).rglob("*.py") if (PACKAGE / room).is_dir() else [PACKAGE / room])
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert not wrong, "\n".join(wrong)
