"""Gauges of all nodes for `/metrics`, on every server of a cluster, and their sums.

What a server counts of its own work is in `own_counters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tinkex.clock import Clock
from tinkex.server.cluster.node_overview import NodeOverview
from tinkex.server.cluster.placement import STATES, state_of
from tinkex.store.cluster.cluster_store import NodeRecord

SUMMED: Final[Sequence[tuple[str, str, Callable[[NodeRecord], int]]]] = (
    ("home_runs", "Runs at home", lambda node: node.runs),
    ("busy_runs", "Runs with unfinished operations", lambda node: node.facts.busy),
    ("operations_queued", "Unfinished operations", lambda node: node.load),
    ("samples", "Sequences that wait or run", lambda node: node.facts.samples),
)


class ClusterGauges(Collector):
    """Gauges of all nodes, which every server has: a row that its node does not renew shows here. And their sums."""

    def __init__(self, overview: NodeOverview, clock: Clock, lease_s: float) -> None:
        self._overview, self._clock, self._lease_s = overview, clock, lease_s

    def describe(self) -> list[Metric]:
        return []  # as `ServiceGauges`

    def collect(self) -> Iterator[Metric]:
        age_s = self._clock.now() - self._overview.seen_at
        # The row that lives longest is the one in use: a node that started again has another id at the same address.
        nodes = {node.url: node for node in sorted(self._overview.seen, key=lambda node: node.left_s)}
        yield self._by_node(
            "tinkex_node_lag_seconds",
            "Time since the node renewed its lease.",
            {url: max(self._lease_s - node.left_s + age_s, 0.0) for url, node in nodes.items()},
        )
        living = {url: node for url, node in nodes.items() if node.left_s > 0}
        for noun, about, value in SUMMED:
            values = {url: float(value(node)) for url, node in living.items()}
            yield self._by_node(f"tinkex_node_{noun}", f"{about} of the node.", values)
            yield GaugeMetricFamily(f"tinkex_cluster_{noun}", f"{about} of all nodes.", sum(values.values()))
        states = GaugeMetricFamily("tinkex_cluster_nodes", "Nodes of the cluster by state.", labels=["state"])
        for state in STATES:
            states.add_metric([state], sum(state_of(node) == state for node in nodes.values()))
        yield states

    @staticmethod
    def _by_node(name: str, about: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, about, labels=["node"])
        for url, value in values.items():
            family.add_metric([url], value)
        return family
