"""The order in which a model's operations run: by seq_id, each once, whatever the network did to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tinkex.testing.handlers.futures import Future


class Conflict(Exception):
    """A seq_id came back with other work."""


class Timer(Protocol):
    """What `loop.call_later` gives."""

    def cancel(self) -> None: ...


@dataclass(slots=True)
class _Known:
    digest: int
    future: Future


class RunQueue:
    """A missing seq_id is awaited for `gap_s`, then skipped; one that comes after a higher one ran is too late."""

    def __init__(self, gap_s: float, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        self.busy_until = 0.0
        self._gap_s = gap_s
        self._call_later = call_later
        self._known: dict[int, _Known] = {}
        self._waiting: dict[int, Callable[[], Any]] = {}
        self._last = 0  # clients count from 1; a first operation 0 is in order too
        self._has_run = False
        self._timer: Timer | None = None

    def find(self, seq_id: int, digest: int) -> Future | None:
        """The future of an earlier attempt at the same operation."""
        known = self._known.get(seq_id)
        if known is None:
            return None
        if known.digest != digest:
            raise Conflict(
                f"seq_id {seq_id} was already used with another body. "
                "Use a new seq_id for new work; a retry must repeat the same body."
            )
        return known.future

    def submit(self, seq_id: int, digest: int, future: Future, run: Callable[[], Any]) -> None:
        """Run in order, now or when the lower ones have come."""
        self._known[seq_id] = _Known(digest, future)
        if self._has_run and seq_id <= self._last:
            future.fail(f"seq_id {seq_id} came after seq_id {self._last} had run; it was not executed.", "user")
            return
        self._waiting[seq_id] = run
        self._drain()

    def _drain(self) -> None:
        while self._waiting:
            first = self._last + 1
            if first not in self._waiting and (first := min(self._waiting)) > self._last + 1:
                # Chunks may overtake each other on the way, and a client that gave one up never sends it.
                self._timer = self._timer or self._call_later(self._gap_s, self._skip)
                return
            self._run(first)
        self._stop_timer()

    def _skip(self) -> None:
        self._timer = None
        if self._waiting:
            self._run(min(self._waiting))
            self._drain()

    def _run(self, seq_id: int) -> None:
        self._stop_timer()
        self._last = seq_id
        self._has_run = True
        self._waiting.pop(seq_id)()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
