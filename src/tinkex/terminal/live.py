"""Writes lines that are drawn over, and knows what a file can show: a terminal, a notebook, or whole lines only.

The cursor is never hidden and always stays at the end of the last line, so nothing has to be restored after a crash.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from tinkex.terminal.format import cells, cut, fold

Mode = Literal["terminal", "notebook", "plain"]
NOTEBOOK_WIDTH = 100


class LiveLines:
    """The last lines of one file, drawn over again and again.

    A terminal shows all of them. A notebook cannot move up, so it shows the first line only. Any other file gets only
    the lines that stay (`above`), and no escape codes. Errors of the file are the caller's.
    """

    def __init__(self, file: Any, mode: Mode) -> None:
        self.file, self.mode = file, mode
        self._lines: list[str] = []

    def draw(self, lines: Sequence[str], above: Sequence[str] = ()) -> None:
        """Replace the live lines, and write the lines `above` them, which stay."""
        if self.mode == "plain":
            text = "".join(f"{line}\n" for line in above)
        else:
            width, height = self.size()
            text = self._redrawn([cut(line, width - 1) for line in lines[: max(height - 1, 1)]], above)
        if text:
            self.file.write(fold(text, getattr(self.file, "encoding", None)))
            self.file.flush()

    def leave(self) -> None:
        """Let the live lines stay as they are, and move the cursor below them."""
        self.draw((), above=self._lines)

    def size(self) -> tuple[int, int]:
        """Return columns and rows. A notebook has room for one live line."""
        return (NOTEBOOK_WIDTH, 2) if self.mode == "notebook" else size_of(self.file)

    def _redrawn(self, shown: list[str], above: Sequence[str]) -> str:
        if not above and shown == self._lines:
            return ""
        before, self._lines = self._lines, shown
        lines = [*above, *(shown or [""])]
        if self.mode == "notebook":
            lines[0] += " " * (cells(before[0]) - cells(lines[0]) if before else 0)
            return "\r" + "\n".join(lines)
        up = f"\x1b[{len(before) - 1}A" if len(before) > 1 else ""
        # The text comes first and the rest of the line is cleared after it, in one write: nothing flickers.
        return f"{up}\r" + "\x1b[K\n".join(lines) + "\x1b[J"


def default_file() -> Any:
    """Return stderr; in a notebook stdout, because a notebook shows stderr as an error."""
    return sys.stdout if _is_notebook(sys.stdout) else sys.stderr


def mode_of(file: Any, live: bool | None = None) -> Mode:
    """Return how to write to a file. `live` overrules: False for whole lines, True for a line that is drawn over."""
    if live is False or file is None:
        return "plain"
    try:
        if file.isatty() and not _is_dumb():
            return "terminal"
    except (AttributeError, ValueError):  # not every file-like object can tell, and a closed one cannot
        pass
    return "notebook" if live or _is_notebook(file) else "plain"


def size_of(file: Any) -> tuple[int, int]:
    """Return columns and rows of the terminal behind a file; 80 x 24, or COLUMNS and LINES, if there is none."""
    try:
        size = os.get_terminal_size(file.fileno())
        if size.columns > 0 and size.lines > 0:
            return size
    except (OSError, ValueError, AttributeError):
        pass
    import shutil

    return shutil.get_terminal_size((80, 24))


def allows_colour(file: Any) -> bool:
    """Whether the file is a terminal that shows colours, and NO_COLOR (no-color.org) is not set."""
    return bool(file.isatty()) and not os.environ.get("NO_COLOR") and not _is_dumb()  # border: about the terminal


def _is_dumb() -> bool:
    """Whether the terminal understands no escape codes, such as the shell inside Emacs."""
    return os.environ.get("TERM") == "dumb"  # border: about the terminal


def _is_notebook(file: Any) -> bool:
    return type(file).__module__.partition(".")[0] == "ipykernel"
