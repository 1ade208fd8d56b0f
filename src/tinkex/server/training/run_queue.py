"""The order of one run: by number, whatever the order of arrival; a missing number is awaited a while, then skipped.

A lane holds what the journal holds of a run's unfinished work, and which numbers were taken. No I/O in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinkex.store.records import OperationRecord, RunRecord

MOST_TAKEN = 10_000
"""Numbers of a run that are remembered here; the journal knows older ones."""


@dataclass(slots=True)
class Pending:
    """An accepted operation that is not finished."""

    request_id: str
    run_id: str
    tenant: str
    seq_id: int
    kind: str
    arrived: float
    cost: int = 0
    tokens: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    command: bytes | None = None
    """Kept while it waits if it is small; otherwise the journal has it."""
    engine_deaths: int = 0
    started: float | None = None


class Taken(NamedTuple):
    """A number that came in: its request, and what it asked for."""

    request_id: str
    digest: str
    is_refused: bool = False


class Lane:
    """One run's queue."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.ran = -1
        """Every number up to this one was run, refused or given up."""
        self.waiting: dict[int, Pending] = {}
        self.running: Pending | None = None
        self.taken: dict[int, Taken] = {}
        self.engine_s = 0.0
        """Engine time since the last snapshot: what a rebuild would cost."""
        self.is_changed = False
        """Whether the adapter differs from its last snapshot."""

    @classmethod
    def restored(cls, run: RunRecord, operations: list[OperationRecord], now: float) -> Lane:
        """From the journal, after a restart."""
        lane = cls(run)
        # A refused number has not run: those before it may still come.
        lane.ran = max((row.seq_id for row in operations if row.state in ("done", "failed")), default=-1)
        for row in operations:
            lane.taken[row.seq_id] = Taken(row.request_id, row.digest, row.state == "refused")
            # A crash may leave one queued that came too late and was about to be told so: see `Worker`.
            if row.state == "queued" and not lane.is_late(row.seq_id):
                lane.waiting[row.seq_id] = pending_of(row, now)
        lane.forget(MOST_TAKEN)
        return lane

    def add(self, pending: Pending, digest: str) -> None:
        self.taken[pending.seq_id] = Taken(pending.request_id, digest)
        self.waiting[pending.seq_id] = pending

    def refuse(self, seq_id: int, request_id: str, digest: str) -> None:
        """The number came in and will never run; the next one need not wait for it."""
        self.taken[seq_id] = Taken(request_id, digest, is_refused=True)

    def is_late(self, seq_id: int) -> bool:
        """Whether a higher number ran already."""
        return seq_id <= self.ran

    def why_late(self, seq_id: int) -> str:
        return (
            f"Operation {seq_id} of model {self.run.id} arrived after operation {self.ran} had run. "
            "Operations run in the order of their seq_id; send this one again under a new number."
        )

    def head(self, now: float, gap_s: float) -> tuple[Pending | None, float | None]:
        """What may run now, and if nothing may: when to look again."""
        if self.running is not None or not self.waiting:
            return None, None
        first = min(self.waiting)
        while self.ran + 1 < first and (entry := self.taken.get(self.ran + 1)) is not None and entry.is_refused:
            self.ran += 1
        pending = self.waiting[first]
        if first == self.ran + 1 or now >= pending.arrived + gap_s:
            return pending, None
        return None, pending.arrived + gap_s

    def missing(self, seq_id: int) -> int | None:
        """The lowest number below this one that has not arrived."""
        return next((n for n in range(self.ran + 1, seq_id) if n not in self.taken), None)

    def ahead(self, seq_id: int) -> int:
        """How many operations run before this one."""
        return sum(number < seq_id for number in self.waiting) + (self.running is not None)

    def start(self, pending: Pending, now: float) -> None:
        self.running = self.waiting.pop(pending.seq_id)
        pending.started = now
        self.ran = max(self.ran, pending.seq_id)
        self.forget(MOST_TAKEN)

    def done(self) -> None:
        self.running = None

    def forget(self, most: int) -> None:
        """Remember the last `most` numbers that ran, and the creation: an older one is found in the journal."""
        while len(self.taken) > most + 1:
            oldest = next((number for number in self.taken if number), self.ran)
            if oldest >= self.ran:
                return
            del self.taken[oldest]

    def next_number(self) -> int:
        """For callers that count nothing themselves."""
        return max((self.ran, *self.taken)) + 1


def pending_of(row: OperationRecord, now: float) -> Pending:
    return Pending(
        request_id=row.request_id,
        run_id=row.run_id,
        tenant=row.tenant,
        seq_id=row.seq_id,
        kind=row.kind,
        arrived=now,
        cost=row.cost_tokens,
        tokens=row.tokens,
        options=row.options,
    )
