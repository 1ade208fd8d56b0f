"""The counters behind `client.stats()`: requests, retries, bytes, seconds. Plain numbers, no history."""

from __future__ import annotations

from typing import Any

from tinkex.events import StepEvent


class Stats:
    """Sums over the life of a link. Written on the loop thread, read as a snapshot."""

    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0
        self.polls = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.rate_limited = 0
        self._operations: dict[str, list[float]] = {}

    def count_step(self, step: StepEvent) -> None:
        sums = self._operations.setdefault(step.operation, [0, 0, 0.0, 0.0, 0.0, 0.0, 0.0])
        row = (1, 0 if step.ok else 1, step.seconds, step.submit_s, step.queue_s, step.compute_s, step.fetch_s)
        for index, amount in enumerate(row):
            sums[index] += amount

    def snapshot(self) -> dict[str, Any]:
        names = ("count", "failed", "seconds", "submit_s", "queue_s", "compute_s", "fetch_s")
        return {
            "requests": self.requests,
            "retries": self.retries,
            "polls": self.polls,
            "rate_limited": self.rate_limited,
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "operations": {kind: dict(zip(names, sums, strict=True)) for kind, sums in list(self._operations.items())},
        }
