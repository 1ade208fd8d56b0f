"""Tables that fit the terminal, and text that cannot control it."""

from __future__ import annotations

import sys

import pytest

from tests.unit.terminal.emulator import TerminalFile
from tinkex.terminal import output

COLUMNS = ("PATH", "SIZE", "TYPE")
LONG = "tinker://6f5f0b43-0000-4000-8000-000000000000:train:0/weights/0001"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> TerminalFile:
    """A terminal for stdout. Not a fixture: pytest puts its own stdout back before the test begins."""
    stream = TerminalFile()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


def test_columns_are_aligned_and_numbers_are_on_the_right() -> None:
    assert output.layout(COLUMNS, [("a", "1 B", "x"), ("bcdef", "10 kB", "y")], None, ["SIZE"]) == [
        "PATH    SIZE  TYPE",
        "a        1 B  x",
        "bcdef  10 kB  y",
    ]


def test_a_table_too_wide_for_the_terminal_keeps_its_first_column_whole() -> None:
    lines = output.layout(COLUMNS, [(LONG, "1 B", "training")], 70, ["SIZE"])
    assert lines == ["PATH", "    SIZE  TYPE", LONG, "     1 B  training"]


def test_nothing_is_wider_than_the_terminal() -> None:
    lines = output.layout(COLUMNS, [(LONG, "1 B", "training")], 12)
    assert max(map(len, lines)) == 12
    assert lines[2].endswith("…")


def test_piped_tables_are_never_cut_and_have_no_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    output.write_table(COLUMNS, [(LONG, "1 B", "training")], ["SIZE"])
    assert capsys.readouterr().out.splitlines()[1] == f"{LONG}   1 B  training"


def test_a_terminal_gets_colours_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = stand_in(monkeypatch)
    output.write_table(COLUMNS, [("a", "1 B", "x")])
    assert terminal.getvalue().startswith("\x1b[1mPATH")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = stand_in(monkeypatch)
    output.write_table(COLUMNS, [("a", "1 B", "x")])
    assert "\x1b" not in terminal.getvalue()


def test_text_from_the_service_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = stand_in(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    output.write_table(COLUMNS, [("a\x1b]0;owned\x07\nb", "1 B", "x")])
    output.write_fields([("name", "\x1b[2Jgone")])
    assert not set(terminal.getvalue()) & {"\x1b", "\x07"}
    assert len(terminal.getvalue().splitlines()) == 3
