"""What a server of a cluster counts of its own work: claims of runs, writes that the fence refused, requests handed on.

Figures of all nodes are in `node_gauges`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class ClusterCounters:
    """Every series has the label `node`: the address of this server, or "front"."""

    def __init__(self, registry: CollectorRegistry, node: str) -> None:
        self._node = node
        self._claims = Counter("tinkex_home_claims", "Runs that got a new home.", ["node"], registry=registry)
        self._fences = Counter(
            "tinkex_home_fences",
            "Writes that were rolled back because a run is at home elsewhere.",
            ["node"],
            registry=registry,
        )
        self._forwards = Counter(
            "tinkex_forwards", "Requests handed to another node.", ["node", "outcome"], registry=registry
        )
        self._runs = Gauge("tinkex_home_runs", "Runs that are at home here.", ["node"], registry=registry)
        for counter in (self._claims, self._fences):  # a rate needs the zero before the first
            counter.labels(node)
        for outcome in ("answered", "unreachable"):
            self._forwards.labels(node, outcome)

    def claimed(self) -> None:
        self._claims.labels(self._node).inc()

    def fenced(self) -> None:
        self._fences.labels(self._node).inc()

    def forwarded(self, *, is_answered: bool) -> None:
        self._forwards.labels(self._node, "answered" if is_answered else "unreachable").inc()

    def set_runs(self, count: int) -> None:
        self._runs.labels(self._node).set(count)
