"""What a start of a server process has in common: its log, the lines that say what it is doing, why it failed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tinkex.clock import REAL

QUIET_S = 1.0
"""A start that takes longer prints what it is doing."""
LINE_S = 5.0
LOOK_S = 0.05
TAIL = 12


class StartLines:
    """Prints a line from time to time while a program waits for a service."""

    def __init__(self, who: str, what: str, log: Path) -> None:
        self._who, self.what, self._log = who, what, log
        self._began, self._printed_at, self._printed = REAL.now(), -LINE_S, ""

    def show(self) -> None:
        """Print what the server is doing, if it is time for a line."""
        waited_s = REAL.now() - self._began
        if waited_s > QUIET_S and waited_s - self._printed_at >= LINE_S:
            # The message of a log line, without time, level and logger.
            line = re.sub(r"^[\d-]+ [\d:,]+ \w+ [\w.]+: ", "", tail(self._log).rpartition("\n")[2])
            doing = f": {line}" if line and line != self._printed else ""
            print(f"{self._who}: {self.what} ({waited_s:.0f} s){doing}", file=sys.stderr)
            self._printed_at, self._printed = waited_s, line


def tail(log: Path) -> str:
    """Return the last lines of a server's log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-TAIL:])


def reason_in(lines: str) -> str:
    """Return the sentence that the command ended with, without the log before it."""
    return f"\n{lines}".rpartition("\ntinkex: ")[2].strip() or "it wrote no reason"
