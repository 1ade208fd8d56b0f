"""Shares one file between all progress displays that write to it: a `Screen` for each file, and a thread that draws.

On a terminal every display has its own line, one below the other. In a notebook only the first display is live; the
others leave only their last line. Any other file gets whole lines now and then.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Any, Protocol

from tinkex.terminal.live import LiveLines, Mode, mode_of

log = logging.getLogger("tinkex.progress")
EXIT_WAIT_S = 1.0
"""How long interpreter exit may wait for a line that is being written: a stopped terminal never accepts it."""


class Display(Protocol):
    """What a screen shows. The screen calls these on its own thread."""

    def live(self, width: int) -> str:
        """Return the line as it is now; "" for none."""
        ...

    def due(self) -> str | None:
        """Return a line for a file that keeps all lines, if it is time for one."""
        ...

    def remarks(self) -> list[str]:
        """Return lines to write once, above the live line."""
        ...


class Screen:
    """One file. Its own thread draws, so that a slow terminal slows down neither the training nor the events."""

    def __init__(self, file: Any, mode: Mode) -> None:
        self.mode = mode
        self._lines = LiveLines(file, mode)
        self._lock = threading.Lock()
        self._displays: list[Display] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._every_s = 1.0
        self._is_broken = file is None
        self._is_over = False

    def add(self, display: Display, every_s: float) -> None:
        with self._lock:
            self._every_s = min(self._every_s, every_s) if self._displays else every_s
            self._displays.append(display)
            if self._thread is None and not self._is_broken:
                self._stopping = threading.Event()
                self._thread = threading.Thread(
                    target=self._work, args=(self._stopping,), name="tinkex-progress", daemon=True
                )
                self._thread.start()

    def remove(self, display: Display, last: str) -> None:
        """Remove a display and leave its last line behind, if there is one."""
        if self._is_over:
            # Closed by the end of the interpreter: a thread that no longer exists may still hold the lock.
            return
        with self._lock:
            self._displays.remove(display)
            self._draw([last] if last else [], leaving=(display,))
            if not self._displays:
                self._stopping.set()
                self._thread = None

    def stop(self) -> None:
        """Stop drawing, even if displays are left: the interpreter ends.

        The thread has to be gone before. A thread that the end catches keeps its lock for ever; one that it catches
        inside a write ends the interpreter with a fatal error. The lock is not taken: a write may hold it for ever.
        """
        self._is_over = self._is_broken = True
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(EXIT_WAIT_S)

    @property
    def is_empty(self) -> bool:
        return not self._displays

    def print(self, text: str) -> None:
        """Write lines above the live ones."""
        with self._lock:
            self._draw(text.split("\n"))

    def _work(self, stopping: threading.Event) -> None:
        while True:
            with self._lock:
                if stopping.is_set():
                    return
                self._draw([])
            stopping.wait(self._every_s)

    def _draw(self, above: list[str], leaving: tuple[Display, ...] = ()) -> None:
        """Draw; the caller holds the lock. An error of the file is logged once and never reaches the training loop."""
        if self._is_broken:
            return
        try:
            above = [*(line for display in (*leaving, *self._displays) for line in display.remarks()), *above]
            if self.mode == "plain":
                self._lines.draw((), [*above, *filter(None, [display.due() for display in self._displays])])
                return
            width = self._lines.size()[0] - 1
            self._lines.draw([line for display in self._displays if (line := display.live(width))], above)
        except Exception as error:  # a closed file, a broken pipe, a full disk must not end the training
            self._is_broken = True
            log.warning("Progress can no longer be shown: %s", error)


_screens: dict[int, Screen] = {}
_lock = threading.Lock()


def show(display: Display, file: Any, live: bool | None, every_s: float) -> Screen:
    """Add a display to the screen of a file. All displays of one file share one screen while any of them is shown."""
    mode = mode_of(file, live)
    with _lock:
        for key in [key for key, screen in _screens.items() if screen.is_empty]:
            del _screens[key]
        screen = _screens.get(id(file))
        if screen is None or screen.mode != mode:
            screen = _screens[id(file)] = Screen(file, mode)
        screen.add(display, every_s)
        return screen


def _stop_all() -> None:
    for screen in list(_screens.values()):
        screen.stop()


def _forget() -> None:
    """Start empty in a forked child: screens and threads belong to the parent, and locks may be held for ever."""
    global _lock
    _lock = threading.Lock()
    _screens.clear()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
