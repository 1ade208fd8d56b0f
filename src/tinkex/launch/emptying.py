"""Waits until a node that drains has no runs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.clock import REAL, Clock

if TYPE_CHECKING:
    from tinkex.store.cluster.cluster_store import ClusterStore

LOOK_S = 0.5


def wait_until_empty(store: ClusterStore, node_id: str, wait_s: float, clock: Clock = REAL) -> int:
    """Return how many runs a node still has after at most so many seconds: 0 is what the caller waits for."""
    give_up = clock.now() + wait_s
    while left := next((node.runs for node in store.list_nodes() if node.id == node_id), 0):
        if clock.now() >= give_up:
            return left
        clock.pause(LOOK_S)
    return 0
