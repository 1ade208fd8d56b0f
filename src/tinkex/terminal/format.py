"""The words of a progress line: numbers as people write them, and a line cut to the width it has."""

from __future__ import annotations

import math
import unicodedata
from typing import NamedTuple

BAR = 16
JOIN = " · "
ASCII = str.maketrans("·→…█░≥", "|>~#.>")
"""What stands in for the marks of a line where the encoding has only letters."""


class Part(NamedTuple):
    """A piece of a line. Where the line is too long, the pieces with the highest `rank` go first."""

    text: str
    rank: int = 0
    more: str = ""
    """Said after the text where the line has room for it."""


def fit(parts: list[Part], width: int) -> str:
    """The parts that have room, joined. What stays too long is cut: a wrapped line could not be drawn over."""
    kept = [part for part in parts if part.text]
    while (line := _joined(kept)) and cells(line) > width:
        loosest = max(kept, key=lambda part: part.rank + bool(part.more))
        if not loosest.rank:
            break
        kept = [part for part in kept if part is not loosest or part.more]
        kept = [part._replace(more="") if part is loosest else part for part in kept]
    return cut(line, width)


def _joined(parts: list[Part]) -> str:
    return JOIN.join(f"{part.text} {part.more}".rstrip() for part in parts)


def cut(text: str, width: int) -> str:
    if cells(text) <= width:
        return text
    kept = text
    while kept and cells(kept) > width - 1:
        kept = kept[:-1]
    return f"{kept.rstrip()}…" if width > 0 else ""


def cells(text: str) -> int:
    """How many columns of a terminal the text takes."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def clean(text: str) -> str:
    """Without control characters: what a service says must not steer the user's terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def bar(done: int, total: int) -> str:
    full = min(BAR * done // total, BAR) if total else 0
    return "█" * full + "░" * (BAR - full)


def number(value: float) -> str:
    """Three digits that tell something: 2.31, 0.420, 1,234, 1.2e-07."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1_000:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.2e}"
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:#.3g}".rstrip(".")


def money(amount: float, currency: str) -> str:
    """Two digits that tell something, and never less than cents: $12.40, $0.031, 0.0042 EUR."""
    size = abs(amount)
    digits = 2 if size >= 1 or size < 1e-9 else min(1 - math.floor(math.log10(size)), 9)
    figure = f"{amount:,.{max(digits, 2)}f}"
    return f"{figure} {currency}" if currency[:1].isalpha() else f"{currency}{figure}"


def duration(seconds: float) -> str:
    """4.2 s, 31 s, 1 min 12 s, 2 h 5 min, 3 d 4 h"""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 1_440:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3_600)
    return f"{hours // 24} d {hours % 24} h"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def fold(text: str, encoding: str | None) -> str:
    """The text with nothing in it that the encoding lacks."""
    if can_encode(text, encoding):
        return text
    return text.translate(ASCII).encode(encoding or "ascii", "replace").decode(encoding or "ascii")


def can_encode(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
