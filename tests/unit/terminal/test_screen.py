"""One screen for a file, shared by several displays."""

from __future__ import annotations

from tests.unit.terminal.emulator import Terminal
from tinkex.terminal.screen import show


def test_displays_share_a_screen_and_leave_nothing_of_what_was_drawn_over() -> None:
    class Fixed:
        text = "a long line"

        def live(self, width: int) -> str:
            return self.text

        def due(self) -> str | None:
            return None

        def remarks(self) -> list[str]:
            return []

    first, second = Fixed(), Fixed()
    with Terminal() as terminal:
        screen = show(first, terminal.file, None, 0.01)
        terminal.wait_for(lambda rows: rows == ["a long line"])
        first.text = "short"
        terminal.wait_for(lambda rows: rows == ["short"])
        assert show(second, terminal.file, None, 0.01) is screen
        terminal.wait_for(lambda rows: rows == ["short", "a long line"])
        screen.print("x")
        terminal.wait_for(lambda rows: rows == ["x", "short", "a long line"])
        screen.remove(first, "1")
        terminal.wait_for(lambda rows: rows == ["x", "1", "a long line"])
        screen.remove(second, "2")
        terminal.wait_for(lambda rows: rows == ["x", "1", "2", ""])
