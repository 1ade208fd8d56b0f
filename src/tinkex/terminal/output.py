"""What commands print: tables, JSON, remarks. Results go to stdout, everything else to stderr.

A table never cuts a value that a user may want to copy: if it is too wide for the terminal, each first column gets its
own line. Text from the service is stripped of control characters, which could control the reader's terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any

from tinkex.terminal.format import clean, cut
from tinkex.terminal.live import allows_colour, size_of

GAP = "  "
INDENT = "    "
STYLES = {"bold": "1", "green": "32", "yellow": "33", "red": "31"}


def write_json(value: object) -> None:
    """Print one JSON document; values of `tinkex.types` become objects."""
    import json

    print(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def write_table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[str] = ()) -> None:
    """Print aligned columns, those titled in `numbers` on the right.

    Output to a pipe or a file is never cut or folded: programs read it.
    """
    width = size_of(sys.stdout)[0] if sys.stdout.isatty() else None
    for index, line in enumerate(layout(titles, [[clean(cell) for cell in row] for row in rows], width, numbers)):
        print(line if index else paint(line, "bold"))


def layout(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, numbers: Container[str] = ()
) -> list[str]:
    """Return the lines of a table that is at most `width` wide (None: unlimited)."""
    table = [titles, *rows]
    lines = _aligned(table, numbers)
    if width is None or all(len(line) <= width for line in lines):
        return lines
    details = _aligned([row[1:] for row in table], numbers)
    folded = [line for row, rest in zip(table, details, strict=True) for line in (row[0], INDENT + rest)]
    return [cut(line, width) for line in folded]


def write_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print the properties of one object, one line each."""
    pairs = list(fields)
    wide = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"{paint(name.ljust(wide), 'bold')}{GAP}{clean(value)}")


def remark(text: str) -> None:
    """Print a sentence for the user on stderr, so that it never mixes with results."""
    print(text, file=sys.stderr, flush=True)


def stream(text: str) -> None:
    """Print a piece of a model's text at once. A model may write anything, even escape codes."""
    sys.stdout.write(clean(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


def paint(text: str, style: str) -> str:
    """Return the text in a colour, if stdout is a terminal that shows colours."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if allows_colour(sys.stdout) else text


def _aligned(table: Sequence[Sequence[str]], numbers: Container[str]) -> list[str]:
    columns = []
    for cells in zip(*table, strict=True):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if cells[0] in numbers else cell.ljust(width) for cell in cells])
    return [GAP.join(row).rstrip() for row in zip(*columns, strict=True)]


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)
