"""Tables that fit, sizes that may be unknown, and text that cannot drive a terminal."""

from __future__ import annotations

import datetime as dt
import io
import sys

import pytest

from tinkex.terminal import output
from tinkex.terminal.output import Column

COLUMNS = (Column("PATH"), Column("SIZE", is_number=True), Column("TYPE"))
LONG = "tinker://6f5f0b43-0000-4000-8000-000000000000:train:0/weights/0001"
NOW = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for stdout. Not a fixture: pytest puts its own stdout back before the test begins."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


def test_columns_are_aligned_and_numbers_stand_on_the_right() -> None:
    assert output.layout(COLUMNS, [("a", "1 B", "x"), ("bcdef", "10 kB", "y")], None) == [
        "PATH    SIZE  TYPE",
        "a        1 B  x",
        "bcdef  10 kB  y",
    ]


def test_a_table_too_wide_for_the_terminal_keeps_its_first_column_whole() -> None:
    lines = output.layout(COLUMNS, [(LONG, "1 B", "training")], 70)
    assert lines == ["PATH", "    SIZE  TYPE", LONG, "     1 B  training"]


def test_nothing_is_wider_than_the_terminal() -> None:
    lines = output.layout(COLUMNS, [(LONG, "1 B", "training")], 12)
    assert max(map(len, lines)) == 12
    assert lines[2].endswith("…")


def test_piped_tables_are_never_cut_and_have_no_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    output.write_table(COLUMNS, [(LONG, "1 B", "training")])
    assert capsys.readouterr().out.splitlines()[1] == f"{LONG}   1 B  training"


def test_a_terminal_gets_colours_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = stand_in(monkeypatch)
    output.write_table(COLUMNS, [("a", "1 B", "x")])
    assert terminal.getvalue().startswith("\x1b[1mPATH")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = stand_in(monkeypatch)
    output.write_table(COLUMNS, [("a", "1 B", "x")])
    assert "\x1b" not in terminal.getvalue()


def test_text_from_the_service_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = stand_in(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    output.write_table(COLUMNS, [("a\x1b]0;owned\x07\nb", "1 B", "x")])
    output.write_fields([("name", "\x1b[2Jgone")])
    assert not set(terminal.getvalue()) & {"\x1b", "\x07"}
    assert len(terminal.getvalue().splitlines()) == 3


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (27_100_000, "27.1 MB"), (10**15, "1.0 PB")],
)
def test_sizes_read_well_and_an_unknown_size_is_a_dash(count: int | None, text: str) -> None:
    assert output.size(count) == text


def test_moments_without_a_time_zone_are_utc() -> None:
    naive = dt.datetime(2026, 4, 30, 21)
    assert output.age(naive, NOW) == "3 h ago"
    assert output.until(naive, NOW) == "expired"
    assert output.until(dt.datetime(2026, 5, 3), NOW) == "in 2 d"
    assert output.moment(naive, NOW) == "2026-04-30 21:00:00 UTC (3 h ago)"
    assert output.until(None, NOW) == "never"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(604_800, "7 d"), (129_600, "1 d 12 h"), (90, "1 min 30 s"), (3600, "1 h"), (1, "1 s"), (0, "0 s")],
)
def test_a_length_of_time_is_told_to_the_second(seconds: int, shown: str) -> None:
    assert output.length(seconds) == shown
