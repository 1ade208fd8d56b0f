"""One run's queue: operations run by sequence number, whatever the order of their arrival.

A number that is missing is waited for, then skipped. A queue knows what the journal knows of a run's unfinished
operations, and which numbers came in. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import NamedTuple

from tinkex.engine.contract import Engine
from tinkex.server.upkeep.base_models import BaseModels
from tinkex.server.upkeep.catalog import Catalog
from tinkex.store.records import Home, OperationRecord, RunRecord

MOST_TAKEN = 200
"""Numbers of a run that are remembered here, more than a client repeats; the journal knows older ones. Each takes 400
bytes: with 10,000 of them a run that went on for a day took 4 MB, and a thousand runs 4 GB."""

MOST_REJECTED = 1000
"""Rejected numbers of a run that are remembered, here and in the journal. A run waits for one that was forgotten, as it
waits for a number that did not come."""


@dataclass(slots=True, eq=False)
class PendingOperation:
    """An accepted operation that is not finished: its row in the journal, and what only matters until it is."""

    row: OperationRecord
    arrived: float
    size: int = 0
    """The bytes of its command; 0 for one that the journal had at the start."""
    command: bytes | None = None
    """The encoded frame for the engine, if it is kept in memory; otherwise it is read from the journal."""
    kept_bytes: int = 0
    engine_deaths: int = 0
    context: Context | None = None
    """The context of the request that brought it: what is logged about it has the request's trace."""
    waits_for: str = ""
    """What it waits for outside of its queue, if it does: a bucket that does not respond."""


class Taken(NamedTuple):
    """A sequence number that came in: its request, and the digest of its content."""

    request_id: str
    digest: str
    is_rejected: bool = False


class RunQueue:
    """The operations of one run that wait, the one that runs, and the sequence numbers that came in."""

    def __init__(self, run: RunRecord, home: Home | None = None) -> None:
        self.run = run
        self.home = home
        """The right to work on the run, where several servers share the store."""
        self.started_up_to = -1
        """Every number up to this one was started, rejected or skipped."""
        self.waiting: dict[int, PendingOperation] = {}
        self.running: PendingOperation | None = None
        self.is_evicting = False
        """Whether the adapter is leaving the engine; no operation starts meanwhile."""
        self.taken: dict[int, Taken] = {}
        self.rejected: dict[int, str] = {}
        """Number → request id of the rejected operations in the journal, the oldest first."""
        self.used_at = 0.0
        """When a request last asked for it."""
        self.engine_s = 0.0
        """Engine time since the last snapshot: what a rebuild would take."""
        self.is_changed = False
        """Whether the adapter differs from its last snapshot."""

    @classmethod
    def restored(
        cls, run: RunRecord, operations: list[OperationRecord], now: float, home: Home | None = None
    ) -> RunQueue:
        """Make the queue of a run from its journal, after a restart."""
        queue = cls(run, home)
        # A rejected number has not run: those before it may still come.
        queue.started_up_to = max((row.seq_id for row in operations if row.state in ("done", "failed")), default=-1)
        for row in operations:
            queue.taken[row.seq_id] = Taken(row.request_id, row.digest, row.state == "refused")
            if row.state == "refused":
                queue.rejected[row.seq_id] = row.request_id
            # A crash may leave an operation queued that came too late and was about to fail: `Worker` fails it.
            if row.state == "queued" and not queue.is_late(row.seq_id):
                queue.waiting[row.seq_id] = PendingOperation(row, now)
        queue.forget(MOST_TAKEN)
        return queue

    def add(self, pending: PendingOperation) -> None:
        row = pending.row
        self.taken[row.seq_id] = Taken(row.request_id, row.digest)
        self.rejected.pop(row.seq_id, None)
        self.waiting[row.seq_id] = pending

    def has(self, seq_id: int) -> bool:
        """Whether the operation of this number waits or runs."""
        return seq_id in self.waiting or (self.running is not None and self.running.row.seq_id == seq_id)

    def reject(self, row: OperationRecord) -> list[str]:
        """Note a number whose content was rejected. Return the request ids of older ones that are forgotten for it."""
        self.taken[row.seq_id] = Taken(row.request_id, "", is_rejected=True)
        self.rejected[row.seq_id] = row.request_id
        forgotten = []
        while len(self.rejected) > MOST_REJECTED:
            oldest = next(iter(self.rejected))
            forgotten.append(self.rejected.pop(oldest))
            if self._is_rejected(oldest):
                del self.taken[oldest]
        return forgotten

    @property
    def is_busy(self) -> bool:
        return self.running is not None or self.is_evicting

    def is_late(self, seq_id: int) -> bool:
        """Whether a higher number ran already."""
        return seq_id <= self.started_up_to

    def late_reason(self, seq_id: int) -> str:
        return (
            f"Operation {seq_id} of model {self.run.id} arrived after operation {self.started_up_to} had run. "
            "Operations run in the order of their seq_id; send this one again under a new number."
        )

    def head(self, now: float, gap_s: float) -> tuple[PendingOperation | None, float | None]:
        """Return the operation that may run now; if there is none, when to look again."""
        if self.is_busy or not self.waiting:
            return None, None
        first = min(self.waiting)
        while self.started_up_to + 1 < first and self._is_rejected(self.started_up_to + 1):
            self.started_up_to += 1
        pending = self.waiting[first]
        if first == self.started_up_to + 1 or now >= pending.arrived + gap_s:
            return pending, None
        return None, pending.arrived + gap_s

    def _is_rejected(self, seq_id: int) -> bool:
        taken = self.taken.get(seq_id)
        return taken is not None and taken.is_rejected

    def missing(self, seq_id: int) -> int | None:
        """Return the lowest number below this one that has not arrived."""
        return next((number for number in range(self.started_up_to + 1, seq_id) if number not in self.taken), None)

    def ahead(self, seq_id: int) -> int:
        return sum(number < seq_id for number in self.waiting) + self.is_busy

    def start(self, pending: PendingOperation) -> None:
        self.running = self.waiting.pop(pending.row.seq_id)
        self.started_up_to = max(self.started_up_to, pending.row.seq_id)
        self.forget(MOST_TAKEN)

    def forget(self, most: int) -> None:
        """Remember the last `most` numbers that ran, and number 0, the creation; the journal knows the others."""
        while len(self.taken) > most + 1:
            oldest = next((number for number in self.taken if number), self.started_up_to)
            if oldest >= self.started_up_to:
                return
            del self.taken[oldest]

    def next_number(self) -> int:
        """Return a number for an operation whose client sent none."""
        return max((self.started_up_to, *self.taken)) + 1


class QueueReasons:
    """Says why operations are not finished, to polls and the console.

    `paused` has the causes for which the worker starts nothing, and their reasons.
    """

    def __init__(self, engine: Engine, catalog: Catalog, models: BaseModels, paused: Mapping[str, str]) -> None:
        self._engine, self._catalog, self._models, self._paused = engine, catalog, models, paused

    def of(self, queue: RunQueue, pending: PendingOperation) -> tuple[str, str]:
        """Return the state of an operation's queue, and why the operation is not finished."""
        engine = self._engine.state
        if reason := next(iter(self._paused.values()), None) or self.unserved(queue):
            return "paused_capacity", reason
        if not engine.is_ready:
            return "paused_capacity", f"the engine is not ready: {engine.reason}"
        if pending.waits_for:
            return "paused_capacity", pending.waits_for
        if queue.running is not pending:
            if (missing := queue.missing(pending.row.seq_id)) is not None:
                return "active", f"waits for operation {missing} of this run, which has not arrived"
            if ahead := queue.ahead(pending.row.seq_id):
                return "active", f"{ahead} operation{'s' if ahead > 1 else ''} of this run before it"
        if reason := self._models.reason(queue.run.base_model):
            return "paused_capacity", reason
        return "active", "running or next in line"

    def unserved(self, queue: RunQueue) -> str | None:
        """Return why a run cannot go on: the service may have been restarted without the run's base model."""
        name = queue.run.base_model
        if self._catalog.get(name) is not None:
            return None
        return (
            f"its base model {name} is not served now; run `tinkex models add {name}`, or start the service with "
            f"--base-model {name}, and it goes on"
        )
