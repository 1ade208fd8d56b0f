"""Formatters: numbers, money, sizes, durations and dates as text; cutting and folding of text."""

from __future__ import annotations

import datetime as dt
import math

import pytest

from tinkex.terminal.format import (
    LinePart,
    age,
    cells,
    clean,
    cut,
    date,
    duration,
    expiry,
    fit,
    fold,
    money,
    number,
    size,
)

NOW = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)


def test_numbers_money_and_durations_are_easy_to_read() -> None:
    assert [number(x) for x in (2.314, 0.42, 12.34, 1234.5, 0.0, -0.5, 1.2e-7, 4.56e12, math.inf)] == [
        "2.31", "0.420", "12.3", "1,234", "0.00", "-0.500", "1.2e-07", "4.56e+12", "inf",
    ]  # fmt: skip
    assert [money(x, "$") for x in (0, 12.4, 1234.567, 0.03, 0.000418)] == [
        "$0.00", "$12.40", "$1,234.57", "$0.030", "$0.00042",
    ]  # fmt: skip
    assert money(0.5, "EUR") == "0.50 EUR"
    assert [duration(s) for s in (0.04, 9.94, 9.96, 59.4, 59.6, 72, 3599.7, 7_500, 86_399, 273_600)] == [
        "0.0 s", "9.9 s", "10 s", "59 s", "1 min", "1 min 12 s", "1 h", "2 h 5 min", "1 d", "3 d 4 h",
    ]  # fmt: skip


def test_wide_characters_count_twice_and_a_cut_line_fits() -> None:
    assert cells("日本") == 4
    for width in range(1, 12):
        assert cells(cut("日本語 text", width)) <= width
    assert fit([LinePart("日本語"), LinePart("x", 1)], 6) == "日本語"
    assert fold("→ …", "latin-1") == "> ~"
    assert fold("→ …", "utf-8") == fold("→ …", None) == "→ …"


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (27_100_000, "27.1 MB"), (10**15, "1.0 PB")],
)
def test_sizes_read_well_and_an_unknown_size_is_a_dash(count: int | None, text: str) -> None:
    assert size(count) == text


def test_moments_without_a_time_zone_are_utc() -> None:
    naive = dt.datetime(2026, 4, 30, 21)
    assert age(naive, NOW) == "3 h ago"
    assert expiry(naive, NOW) == "expired"
    assert expiry(dt.datetime(2026, 5, 3), NOW) == "in 2 d"
    assert date(naive, NOW) == "2026-04-30 21:00:00 UTC (3 h ago)"
    assert expiry(None, NOW) == "never"


@pytest.mark.parametrize(
    ("seconds", "units", "shown"),
    [
        (604_800, 4, "7 d"), (129_600, 4, "1 d 12 h"), (90, 4, "1 min 30 s"), (1, 4, "1 s"), (0, 4, "0 s"),
        (90_061, 4, "1 d 1 h 1 min 1 s"), (90_061, 1, "1 d"), (59.7, 1, "1 min"), (5_400, 1, "2 h"), (4.2, 1, "4 s"),
        (-3.0, 1, "0 s"),
    ],
)  # fmt: skip
def test_a_duration_has_as_many_units_as_asked_for(seconds: float, units: int, shown: str) -> None:
    assert duration(seconds, units) == shown


def test_control_characters_are_replaced_unless_they_are_kept() -> None:
    assert clean("a\x1b[2J\nb\tc") == "a [2J b c"
    assert clean("a\x1b\nb", keep="\n") == "a \nb"
