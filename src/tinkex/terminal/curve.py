"""Draws a curve as text: with braille dots, two by four in a character, or with stars where the encoding has none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from tinkex.terminal.format import can_encode, cut, number

BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot in a braille character: two columns of four."""
MIN_WIDTH, MIN_HEIGHT = 24, 5


class Point(NamedTuple):
    step: int
    value: float


def draw(points: Sequence[Point], name: str, width: int = 72, height: int = 12, encoding: str | None = "utf-8") -> str:
    """Return `height` lines of at most `width` columns: name, curve with its smallest and largest value, steps.

    `encoding` is that of the file which the curve is written to.
    """
    is_ascii = not can_encode("⣿└", encoding)
    width, height = max(width, MIN_WIDTH), max(height, MIN_HEIGHT)
    shown = [point for point in points if math.isfinite(point.value)]
    if not shown:
        return f"{name}: nothing to draw yet."
    low, high = min(point.value for point in shown), max(point.value for point in shown)
    rows = height - 3
    labels = {0: number(high), rows - 1: number(low)}
    if rows >= 5:
        labels[rows // 2] = number(high - (high - low) * (rows // 2) / (rows - 1))
    if low == high:
        labels = {rows // 2: number(low)}
    margin = max(map(len, labels.values()))
    columns = width - margin - 2
    dots = (1, 1) if is_ascii else (2, 4)
    lit = _lit(shown, columns * dots[0], rows * dots[1], low, high)
    axis, tick, corner, dash = "||+-" if is_ascii else "│┤└─"
    lines = [cut(f"{'':{margin}} {name}", width)]
    for row in range(rows):
        drawn = _characters(lit, row, columns, is_ascii)
        lines.append(f"{labels.get(row, ''):>{margin}} {tick if row in labels else axis}{drawn}".rstrip())
    lines.append(f"{'':{margin}} {corner}{dash * columns}")
    lines.append(_steps(shown, margin, columns))
    return "\n".join(lines)


def _lit(points: list[Point], columns: int, rows: int, low: float, high: float) -> set[tuple[int, int]]:
    """Return the dots (column, row) of the curve: the mean of the points in each column, joined by lines."""
    first, last = points[0].step, points[-1].step
    values: dict[int, list[float]] = {}
    for point in points:
        column = round((point.step - first) / (last - first) * (columns - 1)) if last > first else 0
        values.setdefault(column, []).append(point.value)

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2

    corners = [(column, row_of(math.fsum(group) / len(group))) for column, group in sorted(values.items())]
    lit = {corners[0]}
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        for position in range(1, (length := max(x1 - x0, abs(y1 - y0))) + 1):
            lit.add((x0 + round((x1 - x0) * position / length), y0 + round((y1 - y0) * position / length)))
    return lit


def _characters(lit: set[tuple[int, int]], row: int, columns: int, is_ascii: bool) -> str:
    if is_ascii:
        return "".join("*" if (column, row) in lit else " " for column in range(columns))
    cells = (
        sum(DOTS[x][y] for x in range(2) for y in range(4) if (2 * column + x, 4 * row + y) in lit)
        for column in range(columns)
    )
    return "".join(chr(BRAILLE + cell) if cell else " " for cell in cells)


def _steps(points: list[Point], margin: int, columns: int) -> str:
    first, last = f"{points[0].step:,}", f"{points[-1].step:,}"
    if first == last:
        return f"{'':{margin}}  step {first}"
    gap = columns - len(first) - len(last)
    middle = "step" if gap >= len("step") + 2 else ""
    return f"{'':{margin}}  {first}{middle:^{max(gap, 1)}}{last}"
