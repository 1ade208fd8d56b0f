"""What a server knows of all nodes of its cluster, for handlers and the console: their states, models and runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from tinkex.server.cluster.hop import HopFailed, Hops
from tinkex.server.cluster.node_lease import Node
from tinkex.server.cluster.peers import Peers
from tinkex.server.cluster.placement import engines_text, state_of
from tinkex.server.cluster.signature import HEADER, Signer
from tinkex.server.http import views
from tinkex.server.service import Service
from tinkex.server.upkeep.catalog import Catalog
from tinkex.store.cluster.cluster_store import ClusterStore, NodeRecord
from tinkex.store.errors import Unavailable
from tinkex.wire import endpoints

logger = logging.getLogger("tinkex.server")

STATE_WITHIN_S = 2.0
"""How long to wait for a node that is asked for its state. The console asks again after that time."""
LOOK_S = 5.0
"""How often the nodes are read for `/metrics`. A renewal comes every five seconds too."""


def capabilities_of(catalog: Catalog) -> list[dict[str, Any]]:
    return [views.supported_model(model, name) for model in catalog.models for name in model.names]


async def _lives() -> bool:
    """Whether to go on waiting for a node that is asked for its state: `STATE_WITHIN_S` ends the wait."""
    return True


class NodeOverview:
    """Reads the nodes of the cluster for handlers and metrics. `node` is None on a front."""

    def __init__(
        self, service: Service, store: ClusterStore, node: Node | None, peers: Peers, hops: Hops, signer: Signer
    ) -> None:
        self._clock, self._store, self._db, self._catalog = service.clock, store, service.db, service.catalog
        self._node, self._peers, self._hops, self._signer = node, peers, hops, signer
        self.seen: list[NodeRecord] = []
        """Every node of the last hour, as it was read for `/metrics`."""
        self.seen_at = 0.0

    async def keep(self) -> None:
        """Read the nodes now and then, until cancelled."""
        while True:
            try:
                await self._look()
            except Exception as error:  # an edge: `/metrics` shows older figures meanwhile
                logger.warning("the nodes of the cluster cannot be read; trying again: %s", error)
            await self._clock.sleep(LOOK_S)

    async def _look(self) -> list[NodeRecord]:
        self.seen = await self._db(lambda: self._store.list_nodes(only_living=False))
        self.seen_at = self._clock.now()
        return self.seen

    # ── For handlers (`service.OtherServers`)

    async def engines(self, model: str = "") -> str:
        """Say what the engines that have a base model do: "3 engines busy, 1 starting"."""
        with suppress(Unavailable):  # who asks wants to know why it waits: what was known last will do
            await self._peers.living()
        return engines_text([node for node in self._peers.known if node.serves(model)])

    async def capabilities(self) -> list[dict[str, Any]]:
        """Return each model once that some living node serves; this server's own first."""
        found = {entry["model_name"]: entry for entry in capabilities_of(self._catalog)}
        for node in await self._peers.living():
            for entry in node.facts.capabilities:
                found.setdefault(entry["model_name"], dict(entry))
            for name in node.models:  # one of an older release says no more
                found.setdefault(name, {"model_name": name})
        return list(found.values())

    async def nodes(self) -> list[dict[str, object]]:
        """Return all nodes of the last hour, those that live first."""
        nodes = sorted(await self._look(), key=lambda node: (node.left_s <= 0, node.url, node.id))
        return [self._shown(node) for node in nodes]

    async def urls_of(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        """Return the address of the node of each run that is at home on one that lives."""
        found: dict[str, str] = await self._db(self._store.urls_of, run_ids)
        return found

    async def states(self, tenant: str) -> list[dict[str, Any]]:
        """Return what each other living node says of itself to a tenant (`service_state`), if it does so in time."""
        own = "" if self._node is None else self._node.id
        asked = [self._state_of(node.url, tenant) for node in await self._peers.living() if node.id != own]
        return [state for state in await asyncio.gather(*asked) if state is not None]

    async def _state_of(self, url: str, tenant: str) -> dict[str, Any] | None:
        content, target = bytearray(), b"/internal" + endpoints.SERVICE_STATE.path.encode()
        signature = self._signer.sign(tenant, "GET", target, self._clock.wall())
        try:
            async with asyncio.timeout(STATE_WITHIN_S):
                response = await self._hops.send(url, "GET", target, [(HEADER, signature)], b"", _lives)
                async for piece in response.pieces():
                    content += piece
        except (HopFailed, TimeoutError):
            return None
        return orjson.loads(content) if response.status == 200 else None

    def _shown(self, node: NodeRecord) -> dict[str, object]:
        return {
            "id": node.id,
            "url": node.url,
            "is_this": self._node is not None and self._node.id == node.id,
            "kind": node.kind,
            "state": state_of(node),
            "runs": node.runs,
            "busy_runs": node.facts.busy,
            "queued_operations": node.load,
            "samples": node.facts.samples,
            "lease_left_s": round(node.left_s, 3),
            "models": list(node.models),
            "version": node.version,
        }
