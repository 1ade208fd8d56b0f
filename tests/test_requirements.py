"""`tests/README.md` maps every requirement and every excluded defect to tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [f"T{n}" for n in range(1, 16)] + [f"C{n}" for n in range(1, 8)] + [f"H{n}" for n in range(1, 10)]
ROWS += [f"O{n}" for n in range(1, 6)] + [str(n) for n in range(1, 30)]


def mapped() -> dict[str, list[str]]:
    rows = re.findall(r"^\| ([TCHO]?\d+) \| (.+) \|$", (HERE / "README.md").read_text(), re.MULTILINE)
    return {row: re.findall(r"`(test_\w+)`", tests) for row, tests in rows}


def test_every_requirement_and_every_defect_has_a_test() -> None:
    assert list(mapped()) == ROWS
    assert all(mapped().values())


def test_every_test_named_in_the_map_exists() -> None:
    text = "\n".join(path.read_text() for path in HERE.rglob("test_*.py"))
    existing = set(re.findall(r"def (test_\w+)\(", text))
    missing = {name for names in mapped().values() for name in names} - existing
    assert not missing
