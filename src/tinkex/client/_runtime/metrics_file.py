"""`metrics.jsonl`: what a program logged for a run, and its steps, one object a line, on the user's machine.

It is kept whatever service is used, and whether that can be reached or not. It never makes a program fail.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("tinkex.metrics")
MAX_BYTES = 256 << 20
"""Of one run: some million steps. Later lines are left out."""
NOWHERE = "none"


class MetricsFile:
    """The file of one run; made when something is written. From any thread.

    It is opened for every line: a program may train hundreds of runs, and have that many clients at once.
    """

    def __init__(self, folder: str, model_id: str) -> None:
        # A colon is in every run's id, and in no name of a file on Windows.
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in model_id)
        self.path = None if folder in (NOWHERE, "") else Path(folder) / name / "metrics.jsonl"
        self._lock = threading.Lock()
        self._is_begun = False
        self._is_over = self.path is None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a line. Numbers that are not finite have become None before."""
        line = json.dumps(row, ensure_ascii=False, default=str) + "\n"
        with self._lock:
            if self._is_over or self.path is None:
                return
            try:
                if not self._is_begun:
                    self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    self._is_begun = True
                with self.path.open("ab") as file:
                    if file.tell() > MAX_BYTES:
                        raise OSError(f"{self.path} is full, with {MAX_BYTES >> 20} MB")
                    file.write(line.encode("utf-8", "replace"))
            except OSError as error:
                log.warning("Metrics are no longer kept on this machine: %s.", error)
                self._is_over = True
