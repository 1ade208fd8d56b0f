"""Finds and ends processes by a variable of their environment, which everything that they start inherits (Linux)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


def marked(mark: str) -> Iterator[tuple[int, list[str]]]:
    """Yield id and command line of every process with `mark` (NAME=VALUE) in its environment; zombies have none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                yield int(folder.name), words
        except OSError:
            continue  # it has ended meanwhile


def kill_marked(mark: str, name: str = "") -> list[int]:
    """SIGKILL for all of them, or those whose program has this name. Return their ids."""
    killed = []
    for pid, words in list(marked(mark)):
        if not name or words[0].rpartition("/")[2] == name:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            except ProcessLookupError:
                continue
    return killed


def until_none(mark: str, seconds: float) -> float:
    """Wait until no process is left. Return how long that took."""
    began = time.monotonic()
    while left := list(marked(mark)):
        waited = time.monotonic() - began
        assert waited < seconds, f"after {waited:.0f} s there are still {left}"
        time.sleep(0.05)
    return time.monotonic() - began
