"""Chooses which finished samples stay in memory: those of a quarter of an hour, within a budget of bytes.

Beyond the budget the tenant with the most bytes loses its oldest. One queue for all would let a tenant with large
results delete those that another has not fetched yet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

KEPT_S = 900.0
KEPT_BYTES = 256 << 20
"""Results are dropped when they are older, or when all of them are larger."""


class _Entry(NamedTuple):
    sample_id: str
    size_bytes: int
    finished_s: float


class FinishedSamples:
    """Counts the bytes of finished samples, by tenant."""

    def __init__(self) -> None:
        self._entries: dict[str, deque[_Entry]] = {}
        """By tenant, oldest first."""
        self._bytes: Counter[str] = Counter()
        self._total_bytes = 0

    def add(self, tenant: str, sample_id: str, size_bytes: int, now_s: float) -> Iterator[str]:
        """Count a sample that has finished, and yield the ids of those to drop for it."""
        self._entries.setdefault(tenant, deque()).append(_Entry(sample_id, size_bytes, now_s))
        self._bytes[tenant] += size_bytes
        self._total_bytes += size_bytes
        for name in [name for name, entries in self._entries.items() if now_s - entries[0].finished_s >= KEPT_S]:
            while name in self._entries and now_s - self._entries[name][0].finished_s >= KEPT_S:
                yield self._drop_oldest(name)
        while self._total_bytes > KEPT_BYTES and self._entries:
            yield self._drop_oldest(max(self._entries, key=self._bytes.__getitem__))

    def _drop_oldest(self, tenant: str) -> str:
        entry = self._entries[tenant].popleft()
        self._bytes[tenant] -= entry.size_bytes
        self._total_bytes -= entry.size_bytes
        if not self._entries[tenant]:
            del self._entries[tenant], self._bytes[tenant]
        return entry.sample_id
