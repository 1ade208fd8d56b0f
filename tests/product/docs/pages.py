"""The documents of the project, and the pieces of them that tests look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
FOLDERS = ("deploy", "docs", "tests", "examples", "benchmarks", "scripts", "src")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
MARK = re.compile(r"<!-- (?P<text>[^\n]*) -->\n```[^\n]*\n$")
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block. `line` is where its text starts, counted from 0."""

    kind: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield Block(found["kind"].strip(), found["text"], text.count("\n", 0, found.start("text")))


def mark(page: Path, block: Block) -> str:
    """What the comment right above a block says, or nothing."""
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)[: block.line]
    found = MARK.search("".join(lines))
    return found["text"] if found else ""


def prose(page: Path) -> str:
    """The text without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))
