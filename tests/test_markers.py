"""A test that measures how long something takes has the marker `timing`, so that `make test` runs it alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}


def measures(function: ast.AST) -> bool:
    """Return whether it subtracts from a reading of the clock. Adding to one is a deadline, which is fine."""
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and isinstance(node.left, ast.Call)
        and getattr(node.left.func, "attr", getattr(node.left.func, "id", "")) in CLOCKS
        for node in ast.walk(function)
    )


def measuring_tests(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the name of each such test, and whether it is marked. It may measure in a function of its module."""
    tree = ast.parse(source)
    marks_all = "pytestmark = pytest.mark.timing" in source
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    clocks = {node.name for node in functions if measures(node)}
    for node in functions:
        called = {getattr(call.func, "id", "") for call in ast.walk(node) if isinstance(call, ast.Call)}
        if node.name.startswith("test_") and (node.name in clocks or called & clocks):
            is_marked = any(ast.unparse(decorator) == "pytest.mark.timing" for decorator in node.decorator_list)
            yield node.name, marks_all or is_marked


def test_what_measures_time_is_marked_timing() -> None:
    names = [found for path in HERE.rglob("test_*.py") for found in measuring_tests(path.read_text())]
    assert len(names) > 20
    assert [name for name, is_marked in names if not is_marked] == []


def test_a_measuring_test_without_the_marker_is_noticed() -> None:
    source = "def test_x():\n    began = time.monotonic()\n    assert time.monotonic() - began < 1\n"
    assert list(measuring_tests(source)) == [("test_x", False)]
    assert list(measuring_tests(f"@pytest.mark.timing\n{source}")) == [("test_x", True)]
    helper = source.replace("test_x", "took")
    assert list(measuring_tests(f"{helper}def test_y():\n    assert took() < 1\n")) == [("test_y", False)]
    assert list(measuring_tests(source.replace(" - began", "").replace("monotonic()\n", "monotonic() + 1\n"))) == []
