"""The counters behind `client.stats()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tinkex import events


@dataclass
class Stats:
    """Sums over the life of a link, written on the loop thread."""

    requests: int = 0
    retries: int = 0
    polls: int = 0
    rate_limited: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    operations: dict[str, dict[str, float]] = field(default_factory=dict)

    def count_step(self, step: events.StepEvent) -> None:
        sums = self.operations.get(step.operation)
        if sums is None:
            sums = self.operations[step.operation] = {"count": 0, "failed": 0}
        sums["count"] += 1
        sums["failed"] += not step.ok
        for name in ("seconds", "submit_s", "queue_s", "compute_s", "fetch_s"):
            sums[name] = sums.get(name, 0.0) + getattr(step, name)

    def snapshot(self) -> dict[str, Any]:
        return {**vars(self), "operations": {kind: dict(sums) for kind, sums in list(self.operations.items())}}
