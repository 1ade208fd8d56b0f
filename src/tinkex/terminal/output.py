"""What commands print: tables, JSON, remarks. Results go to stdout, everything else to stderr.

A table never cuts a value that a user may want to copy: one too wide for the terminal puts its first column on a line
of its own. Text from the service is stripped of control characters, which could drive the reader's terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import datetime as dt

NONE = "–"
GAP = "  "
INDENT = "    "
STYLES = {"bold": "1", "green": "32", "yellow": "33", "red": "31"}


class Column(NamedTuple):
    title: str
    is_number: bool = False
    """Numbers stand on the right."""


def write_json(value: object) -> None:
    """One JSON document on stdout; values of `tinkex.types` become objects."""
    import json

    print(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def write_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns on stdout. Piped output is never cut or folded: programs read it."""
    width = terminal_width()
    for number, line in enumerate(layout(columns, [[clean(cell) for cell in row] for row in rows], width)):
        print(line if number else paint(line, "bold"))


def layout(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The lines of a table that is at most `width` wide (None: as wide as it gets)."""
    table = [[column.title for column in columns], *rows]
    lines = _aligned(columns, table)
    if width is None or all(len(line) <= width for line in lines):
        return lines
    details = _aligned(columns[1:], [row[1:] for row in table])
    folded = [line for row, rest in zip(table, details, strict=True) for line in (row[0], INDENT + rest)]
    return [line if len(line) <= width else line[: width - 1] + "…" for line in folded]


def write_fields(fields: Iterable[tuple[str, str]]) -> None:
    """One thing's properties, a line each."""
    pairs = list(fields)
    wide = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"{paint(name.ljust(wide), 'bold')}{GAP}{clean(value)}")


def remark(text: str) -> None:
    """A sentence for the person at the keyboard: stderr, so that it never mixes with results."""
    print(text, file=sys.stderr, flush=True)


def stream(text: str) -> None:
    """A piece of a model's text, at once. A model may write anything, also what a terminal would obey."""
    if sys.stdout.isatty():
        text = "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def clean(text: str) -> str:
    """The text without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def paint(text: str, style: str) -> str:
    """The text in a colour, if stdout is a terminal and the user has not asked for none."""
    if not sys.stdout.isatty():
        return text
    from tinkex.settings import allows_colour

    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if allows_colour() else text


def terminal_width() -> int | None:
    """Columns of the terminal on stdout; None when it is none."""
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size((100, 24)).columns


def size(count: float | None) -> str:
    """Bytes for people: 27.1 MB. Services do not always know."""
    if count is None:
        return NONE
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} PB"


def duration(seconds: float) -> str:
    """The largest unit that fits: 3 d, 5 h, 12 min, 8 s."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def length(seconds: int) -> str:
    """A length of time to the second: 7 d, 1 d 12 h, 90 s as 1 min 30 s."""
    parts = []
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, seconds = divmod(seconds, size_s)
        parts += [f"{number} {unit}"] if number else []
    return " ".join(parts) or "0 s"


def age(moment: dt.datetime | None, now: dt.datetime) -> str:
    return NONE if moment is None else f"{duration((now - aware(moment)).total_seconds())} ago"


def moment(when: dt.datetime, now: dt.datetime) -> str:
    """A date and how long ago it was."""
    return f"{aware(when):%Y-%m-%d %H:%M:%S %Z} ({age(when, now)})"


def until(moment: dt.datetime | None, now: dt.datetime) -> str:
    """How long something is kept; without a moment, for good."""
    if moment is None:
        return "never"
    left = (aware(moment) - now).total_seconds()
    return f"in {duration(left)}" if left > 0 else "expired"


def aware(moment: dt.datetime) -> dt.datetime:
    """Services that leave the time zone out mean UTC."""
    import datetime as dt

    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def now() -> dt.datetime:
    import datetime as dt

    from tinkex.clock import REAL

    return dt.datetime.fromtimestamp(REAL.wall(), dt.UTC)


def _aligned(columns: Sequence[Column], table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return [
        GAP.join(
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in table
    ]


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)
