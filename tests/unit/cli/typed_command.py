"""A command on a terminal of its own: typed to, interrupted, and read as a person would."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`with Terminal("chat") as terminal: terminal.wait_for("> "); terminal.type("hello\\n")`."""

    def __init__(self, *words: str, rows: int = 30, columns: int = 100) -> None:
        self._own, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tinkex", *words], stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            # A notebook's kernel or readline may have set these, and they would overrule the terminal.
            env={name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(inner)
        self.raw = ""
        self._seen = 0

    @property
    def text(self) -> str:
        """All that was written, without what moves the cursor."""
        return ESCAPES.sub("", self.raw).replace("\r", "")

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """Read until this text comes, after what was waited for before; returns what came up to it."""
        end = time.monotonic() + seconds
        while (found := self.text.find(text, self._seen)) < 0:
            assert time.monotonic() < end, f"{text!r} did not come; there is {self.text[self._seen :]!r}"
            if select.select([self._own], [], [], 0.1)[0] and not self._read():
                raise AssertionError(f"it ended before {text!r} came; there is {self.text[self._seen :]!r}")
        came = self.text[self._seen : found + len(text)]
        self._seen = found + len(text)
        return came

    def type(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, and again if nobody heard it: Python loses one that comes between a prompt and its read."""
        for _ in range(10):
            self.type("\x03")
            try:
                self.wait_for(text, seconds=3.0)
                return
            except AssertionError:
                if self.process.poll() is not None:
                    raise
        raise AssertionError(f"ten times Ctrl-C, and {text!r} did not come")

    def end(self, seconds: float = 30.0) -> int:
        """Wait until it ends by itself."""
        while self._read():
            pass
        return self.process.wait(seconds)

    def _read(self) -> bool:
        try:
            piece = os.read(self._own, 65536)
        except OSError:  # how Linux says that nobody has the terminal open any more
            return False
        self.raw += piece.decode(errors="replace")
        return bool(piece)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: object, problem: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._own)
