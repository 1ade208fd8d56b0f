"""Keeps strangers from filling the disk with log: what any connection can cause is logged once in 10 seconds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tinkex.clock import REAL, Clock

EVERY_S = 10.0
SOURCES = {
    "asyncio": ("socket.accept() out of system resource", "socket.send() raised exception"),
    "uvicorn.error": ("Invalid HTTP request received", "Unsupported upgrade request", "No supported WebSocket library"),
}
"""Logger → how the messages begin that one connection each is enough to cause."""


class SparseFilter(logging.Filter):
    """Lets the first record of each such message pass, then one every 10 seconds, with the number left out."""

    def __init__(self, starts: tuple[str, ...], clock: Clock = REAL) -> None:
        super().__init__()
        self._starts, self._clock = starts, clock
        self._passed: dict[str, tuple[float, int]] = {}
        """How a message begins → when one was logged, and how many were left out since."""

    def filter(self, record: logging.LogRecord) -> bool:
        start = next((start for start in self._starts if str(record.msg).startswith(start)), None)
        if start is None:
            return True
        now = self._clock.now()
        logged_at, left_out = self._passed.get(start, (-EVERY_S, 0))
        if now - logged_at < EVERY_S:
            self._passed[start] = logged_at, left_out + 1
            return False
        self._passed[start] = now, 0
        if left_out:
            record.msg = f"{record.msg} ({left_out} more since the last such line)"
        return True


@contextmanager
def sparse_log() -> Iterator[None]:
    """Filter the loggers of `SOURCES` while the block runs."""
    filters = {name: SparseFilter(starts) for name, starts in SOURCES.items()}
    for name, sparse in filters.items():
        logging.getLogger(name).addFilter(sparse)
    try:
        yield
    finally:
        for name, sparse in filters.items():
            logging.getLogger(name).removeFilter(sparse)
