"""Accepted operations: what becomes of each, and the order in which those of one model run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from tinkex.testing.script import Expire, FailFuture, Pending, Twist, Work


class Future:
    """One accepted operation."""

    def __init__(self, op: str, twists: Iterable[Twist], work_s: float) -> None:
        self.id = f"{op}-{uuid4().hex}"
        self.op = op
        self.pending: list[Pending] = []
        self.failure: FailFuture | None = None
        self.result: Any = None
        """What the operation found, as JSON says it."""
        self.work_s = work_s
        self.done = asyncio.Event()
        self.is_expired = False
        self.was_fetched = False
        self.on_done: Callable[[Future], None] | None = None
        for twist in twists:
            self.twist(twist)

    def twist(self, twist: Twist) -> None:
        """Change what becomes of it."""
        match twist:
            case Pending():
                self.pending += [twist] * twist.times
            case Work():
                self.work_s = twist.seconds
            case Expire():
                self.is_expired = True
            case FailFuture():
                self.failure = twist

    def finish(self, result: Any = None) -> None:
        """Done, well or (with a failure) badly: whoever polls now gets the response."""
        if self.done.is_set():  # cancelled while it worked
            return
        self.result = result
        self.done.set()
        if self.on_done is not None:
            self.on_done(self)

    def finish_after(self, seconds: float, result: Any) -> None:
        """The work is done; its result shows after so long."""
        if seconds > 0:
            asyncio.get_running_loop().call_later(seconds, self.finish, result)
        else:
            self.finish(result)

    def fail(self, message: str) -> None:
        """It was the client's fault."""
        self.failure = FailFuture(message, "user")
        self.finish()

    @property
    def is_lost(self) -> bool:
        """Its client was told that there will be no result: asking again is new work."""
        return self.was_fetched and (self.is_expired or self.failure is not None)


class RunQueue:
    """Operations run by seq_id, each once, whatever the network did to them.

    A missing seq_id is awaited for `gap_s`, then skipped; one that comes after a higher one ran is too late.
    """

    def __init__(self, gap_s: float) -> None:
        self.busy_until = 0.0
        self._gap_s = gap_s
        self._waiting: dict[int, Callable[[], None]] = {}
        self._last = 0  # clients count from 1; a first operation 0 is in order too
        self._has_run = False
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, seq_id: int, future: Future, run: Callable[[], None]) -> None:
        """Run in order, now or when the lower ones have come."""
        if self._has_run and seq_id <= self._last:
            future.fail(f"seq_id {seq_id} came after seq_id {self._last} had run; it was not executed.")
        else:
            self._waiting[seq_id] = run
            self._drain()

    def _drain(self, skips_gap: bool = False) -> None:
        while self._waiting:
            first = min(self._waiting)
            if first > self._last + 1 and not skips_gap:
                # Chunks may overtake each other on the way, and a client that gave one up never sends it.
                self._timer = self._timer or asyncio.get_running_loop().call_later(self._gap_s, self._drain, True)
                return
            skips_gap = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._last = first
            self._has_run = True
            self._waiting.pop(first)()
