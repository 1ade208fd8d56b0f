"""Chooses which finished samples stay in memory: by how long they wait for their clients, within a budget of bytes.

A result is asked for as soon as it is there, by a poll that waits for it; it stays for a poll whose response is lost.
Beyond the budget the tenant with the most bytes loses its oldest. One queue for all would let a tenant with large
results delete those that another has not fetched yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT_S = 900.0
"""How long a result stays that was not asked for. Its client may be cut off, or may poll rarely."""
BRIEFLY_S = 120.0
"""How long a result stays after its client has asked for it, or for its size; and a large one in any case, because it
takes memory that others need. Within this time a client reads 256 MiB at 2 MB/s. Sixty small results per second for a
quarter of an hour took 100 MB."""
LARGE_BYTES = 1 << 20
KEPT_BYTES = 256 << 20
"""Results are dropped when all of them are larger."""


class _Entry(NamedTuple):
    size_bytes: int
    since_s: float


@dataclass(slots=True)
class _Results:
    """The results of one tenant, by id, the oldest first."""

    brief: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    """Those that were asked for, and large ones."""
    waiting: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class FinishedSamples:
    """Counts the bytes of finished samples, by tenant."""

    def __init__(self) -> None:
        self._results: dict[str, _Results] = {}
        self.size_bytes = 0

    def add(self, tenant: str, sample_id: str, size_bytes: int, now_s: float) -> Iterator[str]:
        """Count a sample that has finished, and yield the ids of those to drop for it."""
        results = self._results.setdefault(tenant, _Results())
        entries = results.brief if size_bytes > LARGE_BYTES else results.waiting
        entries[sample_id] = _Entry(size_bytes, now_s)
        results.size_bytes += size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > KEPT_BYTES:
            largest = max(self._results, key=lambda name: self._results[name].size_bytes)
            yield self._drop_oldest(largest, self._results[largest].brief or self._results[largest].waiting)

    def note_asked(self, tenant: str, sample_id: str, now_s: float) -> None:
        """Note that the client of a finished sample has asked for it."""
        results = self._results[tenant]
        entry = results.waiting.pop(sample_id, None) or results.brief.pop(sample_id)
        results.brief[sample_id] = _Entry(entry.size_bytes, now_s)

    def expired(self, now_s: float) -> Iterator[str]:
        """Drop those whose time is over, and yield their ids."""
        for tenant, results in list(self._results.items()):
            for entries, kept_s in ((results.brief, BRIEFLY_S), (results.waiting, KEPT_S)):
                while entries and now_s - next(iter(entries.values())).since_s >= kept_s:
                    yield self._drop_oldest(tenant, entries)

    def _drop_oldest(self, tenant: str, entries: OrderedDict[str, _Entry]) -> str:
        results, (sample_id, entry) = self._results[tenant], entries.popitem(last=False)
        results.size_bytes -= entry.size_bytes
        self.size_bytes -= entry.size_bytes
        if not results.brief and not results.waiting:
            del self._results[tenant]
        return sample_id
