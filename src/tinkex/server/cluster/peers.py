"""The nodes that live now, as the database has them, and which of them is to sample."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Collection

from tinkex.clock import Clock
from tinkex.server.upkeep.database_thread import Db
from tinkex.store.cluster.cluster_store import ClusterStore, NodeRecord

FRESH_S = 1.0
"""How long the list of nodes is believed."""


class Peers:
    def __init__(self, clock: Clock, store: ClusterStore, db: Db) -> None:
        self._clock, self._store, self._db = clock, store, db
        self._living: list[NodeRecord] = []
        self._read_at = -math.inf
        """When the query began."""
        self._reading = asyncio.Lock()

    async def living(self, since: float | None = None) -> list[NodeRecord]:
        """Return the nodes that live, by a query that began at `since` or later; a second ago if it is None."""
        async with self._reading:  # those that wait share one query
            began = self._clock.now()
            if self._read_at < (began - FRESH_S if since is None else since):
                self._living = await self._db(self._store.list_nodes)
                self._read_at = began
        return self._living

    async def url_of(self, node_id: str) -> str | None:
        """Return the address of a node, or None if it does not live.

        A node that is not known is looked up again: one that has joined within the last second was taken for gone, and
        its samples for lost, three times in a row.
        """
        asked_at = self._clock.now()
        nodes = await self.living()
        if all(node.id != node_id for node in nodes):
            nodes = await self.living(since=asked_at)
        return next((node.url for node in nodes if node.id == node_id), None)

    async def choose(self, key: str, model: str | None, without: Collection[str] = ()) -> NodeRecord | None:
        """Return the node for a key: always the same one while the nodes are the same.

        When a node comes or goes, only its own keys change their node (rendezvous hashing).
        """
        nodes = [node for node in await self.living() if node.url not in without and node.serves(model or "")]
        fit = [node for node in nodes if not node.is_draining] or nodes
        return max(fit, key=lambda node: _rank(key, node.id), default=None)


def _rank(key: str, node_id: str) -> bytes:
    return hashlib.blake2b(f"{node_id} {key}".encode("utf-8", "replace"), digest_size=8).digest()
