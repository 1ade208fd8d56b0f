"""The nodes that live now, as the database has them, and which of them is to sample."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection

from tinkex.clock import Clock
from tinkex.server.cluster.placement import node_for_sample
from tinkex.server.upkeep.database_thread import Db
from tinkex.store.cluster.cluster_store import ClusterStore, NodeRecord

FRESH_S = 1.0
"""How long the list of nodes is believed."""
RENEWED_S = 0.5
"""A lease that ends so much later than it did was renewed; the times of two reads differ by less."""


class Peers:
    """Keeps a list of the living nodes that is at most a second old."""

    def __init__(self, clock: Clock, store: ClusterStore, db: Db) -> None:
        self._clock, self._store, self._db = clock, store, db
        self.known: list[NodeRecord] = []
        """Those that lived when the list was read last."""
        self._read_at = -math.inf
        """When the query began."""
        self._reading = asyncio.Lock()
        self._until: dict[str, float] = {}
        self._sent: dict[str, int] = {}
        """Sequences that this server sent to each node since it said how many it has."""

    async def living(self, since: float | None = None) -> list[NodeRecord]:
        """Return the nodes that live, by a query that began at `since` or later; a second ago if it is None."""
        async with self._reading:  # those that wait share one query
            began = self._clock.now()
            if self._read_at < (began - FRESH_S if since is None else since):
                self.known = await self._db(self._store.list_nodes)
                self._read_at = began
                until = {node.id: began + node.left_s for node in self.known}
                renewed = {name for name, end in until.items() if end > self._until.get(name, 0.0) + RENEWED_S}
                self._sent = {name: sent for name, sent in self._sent.items() if name in until and name not in renewed}
                self._until = until
        return self.known

    async def url_of(self, node_id: str) -> str | None:
        """Return the address of a node, or None if it does not live.

        A node that is not known is looked up again: one that has joined within the last second was taken for gone, and
        its samples for lost, and the client gave up after three such responses.
        """
        asked_at = self._clock.now()
        nodes = await self.living()
        if all(node.id != node_id for node in nodes):
            nodes = await self.living(since=asked_at)
        return next((node.url for node in nodes if node.id == node_id), None)

    async def choose(
        self, key: str, model: str | None, without: Collection[str] = (), sequences: int = 0
    ) -> NodeRecord | None:
        """Return the node for a key, to which so many sequences are sent (`placement.node_for_sample`)."""
        node = node_for_sample(await self.living(), key, model or "", self._sent, without)
        if node is not None and sequences:
            self._sent[node.id] = self._sent.get(node.id, 0) + sequences
        return node
