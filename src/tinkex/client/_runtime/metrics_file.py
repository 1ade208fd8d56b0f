"""`metrics.jsonl`: what a program logged for a run, and its steps, one object a line, on the user's machine.

It is kept whatever service is used, and whether that can be reached or not. It never makes a program fail.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger("tinkex.metrics")
MAX_BYTES = 256 << 20
"""Of one run: some million steps. Later lines are left out."""
NOWHERE = "none"


class MetricsFile:
    """The file of one run; made when something is written. From any thread."""

    def __init__(self, folder: str, model_id: str) -> None:
        # A colon is in every run's id, and in no name of a file on Windows.
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in model_id)
        self.path = None if folder in (NOWHERE, "") else Path(folder) / name / "metrics.jsonl"
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._bytes = 0
        self._is_over = self.path is None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a line. Numbers that are not finite have become None before."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n"
        with self._lock:
            if self._is_over:
                return
            try:
                if self._file is None:
                    self._open()
                assert self._file is not None
                self._bytes += len(line.encode("utf-8", "replace"))
                if self._bytes > MAX_BYTES:
                    log.warning("%s is full (%d MB): nothing more is written to it.", self.path, MAX_BYTES >> 20)
                    self._stop()
                    return
                self._file.write(line)
                self._file.flush()
            except OSError as error:
                log.warning("Metrics are not kept on this machine: %s.", error)
                self._stop()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _open(self) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = self.path.open("a", encoding="utf-8", errors="replace")
        self._bytes = self._file.tell()

    def _stop(self) -> None:
        self._is_over = True
        if self._file is not None:
            self._file.close()
            self._file = None
