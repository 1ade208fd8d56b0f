"""A pseudo-terminal, and what a person would see on it after all that was written to it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

CODES = re.compile(r"\x1b\[(\d*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class TerminalFile(io.StringIO):
    """Text in memory that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Terminal:
    """`file` is a real terminal of the given size; `rows()` are its lines now."""

    def __init__(self, columns: int = 100, lines: int = 24) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        self.columns = columns
        self.written = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        held = b""
        while True:
            try:
                held += os.read(self._master, 4096)
            except OSError:  # the other end was closed
                return
            text = held.decode("utf-8", "ignore")
            self.written += text
            held = held[len(text.encode()) :]

    def wait_for(self, is_there: Callable[[list[str]], bool], seconds: float = 20.0) -> list[str]:
        end = time.monotonic() + seconds
        while not is_there(rows := self.rows()):
            assert time.monotonic() < end, rows
            time.sleep(0.01)
        return rows

    def wait_for_last(self, words: str) -> list[str]:
        """Until a last line with these words stands, and the cursor on a fresh one."""
        return self.wait_for(lambda rows: len(rows) > 1 and rows[-1] == "" and words in rows[-2])

    def rows(self) -> list[str]:
        """As a terminal shows it. A line that is too long wraps, and nothing clears what it left behind."""
        screen, row, column = [""], 0, 0
        for count, code, control, text in CODES.findall(self.written):
            if code == "A":
                row = max(row - int(count or 1), 0)
            elif code == "K":
                screen[row] = screen[row][:column]
            elif code == "J":
                screen[row] = screen[row][:column]
                del screen[row + 1 :]
            elif code:
                raise AssertionError(f"nobody expects the code {code!r}")
            elif control == "\r":
                column = 0
            elif control == "\n":
                row += 1
                screen += [""] * (row + 1 - len(screen))
            for letter in text:
                if column == self.columns:
                    row, column = row + 1, 0
                    screen += [""] * (row + 1 - len(screen))
                screen[row] = screen[row][:column].ljust(column) + letter + screen[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in screen]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self._reader.join(5)
        os.close(self._master)
