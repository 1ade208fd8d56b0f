"""One line of a progress, made of parts: where the line is too long, the least important parts are dropped."""

from __future__ import annotations

from typing import NamedTuple

from tinkex.terminal.format import cells, cut

BAR = 16
JOIN = " · "


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
