"""Turns values into text for people: numbers, sizes, durations, money, dates. Cleans text, and fits it into a width."""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import datetime as dt

NONE = "–"
ASCII = str.maketrans("·→…█░≥", "|>~#.>")
"""Replacements for our own marks where the encoding has only ASCII."""
BAR = 16
JOIN = " · "
UNITS_S = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


# -- numbers -----------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return three significant digits: 2.31, 0.420, 1,234, 1.2e-07."""
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(value)
    if magnitude >= 1_000:
        return f"{value:,.0f}" if magnitude < 1e9 else f"{value:.2e}"
    if 0 < magnitude < 1e-3:
        return f"{value:.1e}"
    return f"{value:#.3g}".rstrip(".")


def size(count: float | None) -> str:
    """Return a number of bytes: 27.1 MB. Services do not always know a size."""
    if count is None:
        return NONE
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} PB"


def money(amount: float, currency: str) -> str:
    """Return two significant digits, and never less than cents: $12.40, $0.031, 0.0042 EUR."""
    magnitude = abs(amount)
    digits = 2 if magnitude >= 1 or magnitude < 1e-9 else min(1 - math.floor(math.log10(magnitude)), 9)
    figure = f"{amount:,.{max(digits, 2)}f}"
    return f"{figure} {currency}" if currency[:1].isalpha() else f"{currency}{figure}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


# -- time --------------------------------------------------------------------------------------------------------------


def duration(seconds: float, units: int = 2) -> str:
    """Return the largest `units` units: 3 d 4 h, 2 h 5 min, 1 min 12 s, 31 s. Units that are 0 are left out.

    Below ten seconds, the tenths are the second unit: 4.2 s.
    """
    if units > 1 and seconds < 9.95 and seconds != int(seconds):
        return f"{seconds:.1f} s"
    # From the smallest group of units to the largest: the first one that the rounded value fits into.
    for first in reversed(range(len(UNITS_S))):
        shown = UNITS_S[first : first + units]
        rest = round(seconds / shown[-1][1]) * shown[-1][1]
        if not first or rest < UNITS_S[first - 1][1]:
            break
    parts = []
    for unit, length_s in shown:
        count, rest = divmod(rest, length_s)
        parts += [f"{count} {unit}"] if count > 0 else []
    return " ".join(parts) or "0 s"


def age(moment: dt.datetime | None, now: dt.datetime) -> str:
    return NONE if moment is None else f"{duration((now - aware(moment)).total_seconds(), 1)} ago"


def date(moment: dt.datetime, now: dt.datetime) -> str:
    """Return a date and how long ago it was."""
    return f"{aware(moment):%Y-%m-%d %H:%M:%S %Z} ({age(moment, now)})"


def expiry(moment: dt.datetime | None, now: dt.datetime) -> str:
    """Return when something expires, from now."""
    if moment is None:
        return "never"
    left_s = (aware(moment) - now).total_seconds()
    return f"in {duration(left_s, 1)}" if left_s > 0 else "expired"


def aware(moment: dt.datetime) -> dt.datetime:
    """Return the date with a time zone. Services that leave the time zone out mean UTC."""
    import datetime as dt

    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def utc_now() -> dt.datetime:
    import datetime as dt

    from tinkex.clock import REAL

    return dt.datetime.fromtimestamp(REAL.wall(), dt.UTC)


# -- text --------------------------------------------------------------------------------------------------------------


def clean(text: str, keep: str = "") -> str:
    """Replace control characters, except those in `keep`: text from a service must not control the user's terminal."""
    return "".join(letter if letter.isprintable() or letter in keep else " " for letter in text)


def cells(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def cut(text: str, width: int) -> str:
    """Return the text, shortened to at most `width` columns."""
    if cells(text) <= width:
        return text
    while text and cells(text) > width - 1:
        text = text[:-1]
    return f"{text.rstrip()}…" if width > 0 else ""


def fold(text: str, encoding: str | None) -> str:
    """Return the text with every character replaced that the encoding lacks."""
    if can_encode(text, encoding):
        return text
    return text.translate(ASCII).encode(encoding or "ascii", "replace").decode(encoding or "ascii")


def can_encode(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


# -- one line of a progress --------------------------------------------------------------------------------------------


class LinePart(NamedTuple):
    """A part of a line. Where the line is too long, the parts with the highest `rank` are dropped first, 0 never."""

    text: str
    rank: int = 0
    more: str = ""
    """Added after the text where the line has room for it."""


def fit(parts: list[LinePart], width: int) -> str:
    """Join the parts that have room. The rest is cut: a wrapped line could not be drawn over."""
    shown = [part for part in parts if part.text]
    while (line := _joined(shown)) and cells(line) > width:
        loosest = max(shown, key=lambda part: part.rank + bool(part.more))
        if not loosest.rank:
            break
        shown = [part for part in shown if part is not loosest or part.more]
        shown = [part._replace(more="") if part is loosest else part for part in shown]
    return cut(line, width)


def bar(done: int, total: int) -> str:
    full = min(BAR * done // total, BAR) if total else 0
    return "█" * full + "░" * (BAR - full)


def _joined(parts: list[LinePart]) -> str:
    return JOIN.join(f"{part.text} {part.more}".rstrip() for part in parts)
