"""Lines that are drawn over, and what a file can show."""

from __future__ import annotations

import io

import pytest

from tests.unit.terminal.emulator import Terminal
from tinkex.terminal.live import LiveLines, allows_colour, mode_of, size_of


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def test_lines_replace_the_lines_before_them_and_can_be_left_behind() -> None:
    with Terminal(columns=20) as terminal:
        live = LiveLines(terminal.file, "terminal")
        live.draw(["one", "a longer line", "three"])
        terminal.wait_for(lambda rows: rows == ["one", "a longer line", "three"])
        live.draw(["four", "x" * 40])
        terminal.wait_for(lambda rows: rows == ["four", "x" * 18 + "…"])
        live.draw(["four"], above=["stays"])
        terminal.wait_for(lambda rows: rows == ["stays", "four"])
        live.leave()
        live.draw(["five"])
        terminal.wait_for(lambda rows: rows == ["stays", "four", "five"])


def test_more_lines_than_rows_are_not_drawn() -> None:
    with Terminal(lines=4) as terminal:
        LiveLines(terminal.file, "terminal").draw([str(number) for number in range(9)])
        terminal.wait_for(lambda rows: rows == ["0", "1", "2"])


def test_the_same_lines_are_not_written_again() -> None:
    file = io.StringIO()
    live = LiveLines(file, "terminal")
    live.draw(["one"])
    written = file.getvalue()
    live.draw(["one"])
    assert written and file.getvalue() == written


def test_a_plain_file_gets_only_the_lines_that_stay() -> None:
    file = io.StringIO()
    live = LiveLines(file, "plain")
    live.draw(["live"])
    live.draw(["live"], above=["stays"])
    live.leave()
    assert file.getvalue() == "stays\n"


def test_a_notebook_shows_the_first_line_and_no_escape_codes() -> None:
    file = io.StringIO()
    live = LiveLines(file, "notebook")
    live.draw(["a long line", "another"])
    live.draw(["short"])
    assert file.getvalue() == "\ra long line\rshort      "


def test_the_mode_is_detected_and_can_be_overruled() -> None:
    class Bare:
        """Cannot tell whether it is a terminal."""

    assert mode_of(Bare()) == mode_of(io.StringIO()) == mode_of(None, True) == "plain"
    assert mode_of(Bare(), True) == "notebook"
    with Terminal() as terminal:
        assert mode_of(terminal.file) == mode_of(terminal.file, True) == "terminal"
        assert mode_of(terminal.file, False) == "plain"


def test_a_dumb_terminal_gets_no_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Terminal() as terminal:
        assert mode_of(terminal.file) == "plain"
        assert mode_of(terminal.file, True) == "notebook"
        assert not allows_colour(terminal.file)


def test_only_a_terminal_gets_colours_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not allows_colour(io.StringIO())
    with Terminal() as terminal:
        assert allows_colour(terminal.file)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not allows_colour(terminal.file)


def test_the_size_is_that_of_the_terminal_or_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(columns=33, lines=7) as terminal:
        assert tuple(size_of(terminal.file)) == (33, 7)
    monkeypatch.setenv("COLUMNS", "44")
    assert size_of(io.StringIO())[0] == 44
