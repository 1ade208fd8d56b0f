"""The nodes that live now, as the database has them, and which of them is to sample."""

from __future__ import annotations

import asyncio
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
    def __init__(self, clock: Clock, store: ClusterStore, db: Db) -> None:
        self._clock, self._store, self._db = clock, store, db
        self.known: list[NodeRecord] = []
        """Those that lived when the list was read last."""
        self._read_at = -FRESH_S
        self._reading = asyncio.Lock()
        self._until: dict[str, float] = {}
        self._sent: dict[str, int] = {}
        """Sequences that this server sent to each node since it said how many it has."""

    async def living(self) -> list[NodeRecord]:
        async with self._reading:  # those that wait share one query
            now = self._clock.now()
            if now - self._read_at >= FRESH_S:
                self.known = await self._db(self._store.list_nodes)
                self._read_at = now
                until = {node.id: now + node.left_s for node in self.known}
                renewed = {name for name, end in until.items() if end > self._until.get(name, 0.0) + RENEWED_S}
                self._sent = {name: sent for name, sent in self._sent.items() if name in until and name not in renewed}
                self._until = until
        return self.known

    async def url_of(self, node_id: str) -> str | None:
        """Return the address of a node, or None if it does not live."""
        return next((node.url for node in await self.living() if node.id == node_id), None)

    async def choose(
        self, key: str, model: str | None, without: Collection[str] = (), sequences: int = 0
    ) -> NodeRecord | None:
        """Return the node for a key, to which so many sequences are sent (`placement.node_for_sample`)."""
        node = node_for_sample(await self.living(), key, model or "", self._sent, without)
        if node is not None and sequences:
            self._sent[node.id] = self._sent.get(node.id, 0) + sequences
        return node
