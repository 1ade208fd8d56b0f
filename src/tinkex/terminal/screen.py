"""Who may write where: one `Screen` for each file, shared by all that show their progress there.

On a terminal every progress has a line of its own, one below the other. The cursor is never hidden and never left
elsewhere, so there is nothing to put back after a crash. A notebook knows no way back up: the progress begun first has
the line, the others leave only their last one. Any other file gets whole lines now and then, and no escape codes.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import threading
from typing import Any, Literal, Protocol

from tinkex.terminal.format import cells, fold

log = logging.getLogger("tinkex.progress")
Mode = Literal["terminal", "notebook", "plain"]
NOTEBOOK_WIDTH = 100
EXIT_WAIT_S = 1.0
"""How long interpreter exit may wait for a line that is just being written: a stopped terminal never takes it."""


class Shown(Protocol):
    """What a screen asks of a progress; on the screen's own thread."""

    def live(self, width: int) -> str:
        """The line as it is now."""
        ...

    def due(self) -> str | None:
        """A line for a file that keeps all of them, if it is time for one."""
        ...

    def remark(self) -> str | None:
        """Something to be said once, above the line."""
        ...


class Screen:
    """One file. Its thread draws, so that a terminal slow to scroll slows no training and no event down."""

    def __init__(self, file: Any, mode: Mode) -> None:
        self._file, self.mode = file, mode
        self._lock = threading.Lock()
        self._shown: list[Shown] = []
        self._texts: list[str] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._every_s = 1.0
        self._is_broken = file is None
        self._is_over = False

    def add(self, shown: Shown, every_s: float) -> None:
        with self._lock:
            self._every_s = min(self._every_s, every_s) if self._shown else every_s
            self._shown.append(shown)
            if self._thread is None and not self._is_broken:
                self._stopping = threading.Event()
                self._thread = threading.Thread(
                    target=self._work, args=(self._stopping,), name="tinkex-progress", daemon=True
                )
                self._thread.start()

    def remove(self, shown: Shown, last: str) -> None:
        """Take a progress off and leave its last line behind."""
        if self._is_over:
            return  # a loop left open, closed by the interpreter's end: the lock may be held by a thread that is gone
        with self._lock:
            self._shown.remove(shown)
            self._draw([last], leaving=(shown,))
            if not self._shown:
                self._stopping.set()
                self._thread = None

    def stop(self) -> None:
        """No more drawing, whoever is still shown: the interpreter ends.

        The thread has to be gone before: one that is caught by the end keeps its lock for ever, and one caught inside a
        write ends the interpreter with a fatal error. The lock is not asked for, a write may hold it without end.
        """
        self._is_over = self._is_broken = True
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(EXIT_WAIT_S)

    @property
    def is_empty(self) -> bool:
        return not self._shown

    def print(self, text: str) -> None:
        """Lines above whatever is live."""
        with self._lock:
            self._draw(text.split("\n"))

    def _work(self, stopping: threading.Event) -> None:
        while True:
            with self._lock:
                if stopping.is_set():
                    return
                self._draw([])
            stopping.wait(self._every_s)

    def _draw(self, above: list[str], leaving: tuple[Shown, ...] = ()) -> None:
        """With the lock held. Whatever is wrong with the file is said once in the log, and is no affair of the loop."""
        if self._is_broken:
            return
        try:
            above = [*filter(None, [shown.remark() for shown in (*leaving, *self._shown)]), *above]
            if self.mode == "plain":
                above = [*above, *filter(None, [shown.due() for shown in self._shown])]
                written = "".join(f"{text}\n" for text in above)
            else:
                written = self._lines(above)
            if written:
                self._file.write(fold(written, getattr(self._file, "encoding", None)))
                self._file.flush()
        except Exception as problem:  # an edge: a closed file, a broken pipe, a full disk must not end the training
            self._is_broken = True
            log.warning("The progress cannot be shown any more: %s", problem)

    def _lines(self, above: list[str]) -> str:
        width, height = self._size()
        shown = self._shown[: max(height - 1, 1)] if self.mode == "terminal" else self._shown[:1]
        texts = [one.live(width - 1) for one in shown]
        if not above and texts == self._texts:
            return ""
        before, self._texts = self._texts, texts
        lines = [*above, *(texts or [""])]
        if self.mode == "notebook":
            lines[0] += " " * (cells(before[0]) - cells(lines[0]) if before else 0)
            return "\r" + "\n".join(lines)
        up = f"\x1b[{len(before) - 1}A" if len(before) > 1 else ""
        # Text first and the rest of the line cleared after it, in one write: nothing flickers.
        return f"{up}\r" + "\x1b[K\n".join(lines) + "\x1b[J"

    def _size(self) -> tuple[int, int]:
        if self.mode == "notebook":
            return NOTEBOOK_WIDTH, 2
        try:
            found = os.get_terminal_size(self._file.fileno())
            if found.columns > 0 and found.lines > 0:
                return found.columns, found.lines
        except (OSError, ValueError, AttributeError):
            pass
        return shutil.get_terminal_size((80, 24))


_screens: dict[int, Screen] = {}
_lock = threading.Lock()


def show(shown: Shown, file: Any, live: bool | None, every_s: float) -> Screen:
    """Put a progress on the screen of a file, which is the same one for all, as long as someone uses it."""
    mode = mode_of(file, live)
    with _lock:
        for number in [number for number, screen in _screens.items() if screen.is_empty]:
            del _screens[number]
        screen = _screens.get(id(file))
        if screen is None or screen.mode != mode:
            screen = _screens[id(file)] = Screen(file, mode)
        screen.add(shown, every_s)
        return screen


def _stop_all() -> None:
    for screen in list(_screens.values()):
        screen.stop()


def _forget() -> None:
    """In a forked child: screens and their threads are the parent's, and locks may be held for ever."""
    global _lock
    _lock = threading.Lock()
    _screens.clear()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def default_file() -> Any:
    """stderr; in a notebook stdout, because there stderr is painted as an error."""
    return sys.stdout if _is_notebook(sys.stdout) else sys.stderr


def mode_of(file: Any, live: bool | None) -> Mode:
    if live is False or file is None:
        return "plain"
    try:
        if file.isatty():
            return "terminal"
    except (AttributeError, ValueError):  # not every file-like object can tell, and a closed one cannot
        pass
    return "notebook" if live or _is_notebook(file) else "plain"


def _is_notebook(file: Any) -> bool:
    return type(file).__module__.partition(".")[0] == "ipykernel"
