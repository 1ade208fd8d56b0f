"""Curves as text: their size, their direction, and the characters that an encoding has."""

from __future__ import annotations

import math

import pytest

from tinkex.terminal.curve import Point, draw
from tinkex.terminal.format import number


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(("width", "height"), [(72, 12), (40, 8), (120, 30), (24, 5)])
@pytest.mark.parametrize("count", [2, 7, 5_000])
def test_a_curve_has_the_size_asked_for_and_falls_where_the_values_fall(
    encoding: str, width: int, height: int, count: int
) -> None:
    points = [Point(step, 3.0 - 2.5 * step / count) for step in range(1, count + 1)]
    lines = draw(points, "loss", width, height, encoding).splitlines()
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert len(lines[-2]) == width
    assert lines[1].lstrip().startswith(number(points[0].value))
    assert lines[-3].lstrip().startswith("0.500")
    assert lines[-1].split() == ["1", "step", f"{count:,}"]
    starts = [len(line) - len(line[9:].lstrip()) for line in lines[1:-2]]
    assert starts == sorted(starts)
    assert lines[1][7:9].strip() or lines[1][8:10].strip(), "it begins at the top left"
    assert "".join(lines).isascii() == (encoding == "ascii")


def test_a_curve_of_little_or_nothing_is_drawn_too() -> None:
    assert draw([], "loss") == draw([Point(1, math.nan)], "loss") == "loss: nothing to draw yet."
    assert "2.00" in draw([Point(5, 2.0)], "loss")
    flat = draw([Point(1, 2.0), Point(9, 2.0)], "loss").splitlines()
    assert sum("⠤" in line or "⠒" in line or "⠉" in line or "⣀" in line for line in flat) == 1
    assert len(draw([Point(1, 1.0), Point(2, 2.0)], "loss", 1, 1).splitlines()) == 5
