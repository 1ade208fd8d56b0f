"""Whether a process of this machine runs."""

from __future__ import annotations

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_ended(pid: int, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)
