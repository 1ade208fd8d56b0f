"""What a server does besides its own work because it is one of several: its lease, its runs, requests handed on."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

from starlette.middleware import Middleware

from tinkex.engine.contract import Engine, EngineDied, EngineUnusable
from tinkex.server.cluster.homes import Homes
from tinkex.server.cluster.hop import Hops
from tinkex.server.cluster.middleware import ClusterMiddleware
from tinkex.server.cluster.no_engine import NoEngine
from tinkex.server.cluster.node_gauges import ClusterGauges
from tinkex.server.cluster.node_lease import Node
from tinkex.server.cluster.node_overview import NodeOverview, capabilities_of
from tinkex.server.cluster.own_counters import ClusterCounters
from tinkex.server.cluster.peers import Peers
from tinkex.server.cluster.placement import runs_to_give_up
from tinkex.server.cluster.signature import Signer
from tinkex.server.cluster.switch import Switch
from tinkex.server.sampling.sample_queue import PREFIX as SAMPLE_PREFIX
from tinkex.server.service import Service
from tinkex.server.tls.contexts import HANDSHAKE_S, client_context, server_context
from tinkex.settings import ServeConfig
from tinkex.store.cluster.cluster_store import ClusterStore, NodeFacts
from tinkex.store.errors import HomeLost, Unavailable
from tinkex.store.records import Home

logger = logging.getLogger("tinkex.server")

LOOK_S = 5.0
"""How often a node looks for work whose run has no home that lives, and lets go of runs that have nothing to do."""
LEADS_S = 90.0
"""How long one node cleans up for all unless it renews that: three times the 30 s between two cleanups."""
DRAINED_AT_ONCE = 8
"""Runs that leave a draining node at the same time: each writes a snapshot."""


def engine_of_front() -> Engine:
    return NoEngine()


def tls_of(config: ServeConfig) -> tuple[ssl.SSLContext, float] | None:
    """Return what a node with a certificate serves with, and how long a handshake may take. Raises ConfigError."""
    context = server_context(config)
    return None if context is None else (context, HANDSHAKE_S)


class ClusterMember:
    """Built around a service before it serves. `join` before its first request, `leave` after its last."""

    def __init__(self, service: Service) -> None:
        config, clock, worker = service.config, service.clock, service.worker
        assert isinstance(service.store, ClusterStore) and config.cluster_secret is not None
        self._service, self._store = service, service.store
        self.node: Node | None = None
        if not config.no_engine:
            self.node = node = Node(config, clock, service.catalog.names, self._facts)
            node.on_given_up = self._on_given_up
            # At once: a sample named after a former id would be reported lost, and a client asks three times only.
            node.on_joined = self._name_samples
            service.readiness.is_announced = lambda: node.is_announced
        self._counters = ClusterCounters(service.metrics.registry, config.node_url or "front")
        self.homes = Homes(self.node, clock, service.store, service.db, self._counters, worker.forget)
        worker.homes = self.homes
        self._hops = Hops(clock, None if config.cluster_ca is None else client_context(config))
        self._peers = Peers(clock, service.store, service.db)
        self._signer = Signer(config.cluster_secret)
        self._overview = NodeOverview(service, service.store, self.node, self._peers, self._hops, self._signer)
        service.others = self._overview
        gauges = ClusterGauges(self._overview, clock, config.node_lease_s)
        service.metrics.registry.register(gauges)
        self._switch = Switch(service, self.node, self.homes, self._peers)
        self._idle: set[Home] = set()
        """Runs at home here that had nothing to do when they were looked at last."""

    @property
    def middleware(self) -> Middleware:
        return Middleware(
            ClusterMiddleware,
            switch=self._switch,
            hops=self._hops,
            signer=self._signer,
            counters=self._counters,
            homes=self.homes,
        )

    async def join(self) -> None:
        if self.node is not None:
            await self.node.join()

    async def run(self) -> None:
        """Keep the lease, look after this node's runs, and read the list of the others, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._overview.keep())
                if self.node is not None:
                    tasks.create_task(self.node.keep())
                    tasks.create_task(self._announce(self.node))
                    tasks.create_task(self._look_after_runs(self.node))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def leave(self) -> None:
        self._hops.close()
        if self.node is not None:
            await self.node.leave()

    async def leads(self) -> bool:
        """Return whether this node is the one that cleans up for all."""
        return self.node is not None and await self._service.db(self._store.lead, self.node.id, LEADS_S)

    def _name_samples(self) -> None:
        assert self.node is not None
        self._service.sampling.new_id = _sample_ids(self.node.id)

    def _facts(self) -> NodeFacts:
        service, state = self._service, self._service.engine.state
        samplers = state.extras.get("samplers", {}).values()  # vLLM loads for minutes after the trainer is ready
        return NodeFacts(
            operations=service.worker.queued,
            runs=len(self.homes.held),
            busy=len(self._unfinished()),
            samples=service.sampling.queued + service.sampling.running,
            is_ready=state.is_ready and all(sampler.is_ready for sampler in samplers),
            capabilities=capabilities_of(service.catalog),
        )

    def _unfinished(self) -> Counter[str]:
        """Return how many operations of each run are not finished, of runs that have some."""
        return Counter(pending.row.run_id for pending in self._service.worker.waiting())

    async def _announce(self, node: Node) -> None:
        """Let the others know at once that the engine has started: until then no run is placed here."""
        with suppress(EngineDied, EngineUnusable):  # the server ends
            await self._service.engine.ready()
            try:
                await node.renew()
            except Exception as error:  # an edge, as in `Node.keep`: the next renewal says it
                logger.warning("the others do not know yet that this node is ready: %s", error)

    def _on_given_up(self) -> None:
        self.homes.lose_all()

    async def _look_after_runs(self, node: Node) -> None:
        while True:
            try:
                if node.is_draining:
                    await self.homes.look()
                    await self._drain()
                else:
                    await self._adopt(node)
                    await self._move(node)
                    await self._release_idle()
                    await self._even_out(node)
                self._counters.set_runs(len(self.homes.held))
                await self._service.db(self._store.forget_nodes)
            except Unavailable as error:
                logger.warning("the runs of this node cannot be looked after; trying again: %s", error)
            except Exception as error:  # an edge: one bad row must not stop the node
                logger.error("looking after the runs of this node failed", exc_info=error)
            await self._service.clock.sleep(LOOK_S)

    async def _adopt(self, node: Node) -> None:
        """Run what was accepted for runs without a home that lives, also if no client asks for it."""
        for run_id in await self._service.db(self._store.waiting_runs, node.id):
            try:
                if not self._service.worker.has_queue(run_id) and await self.homes.find(run_id, "") == "":
                    await self._service.worker.run_queue(run_id)
            except HomeLost:
                pass  # another node was faster

    async def _release_idle(self) -> None:
        """Let go of runs that had no queue the last time either: a claim comes a moment before the queue is read."""
        idle = {home for home in self.homes.held if not self._service.worker.has_queue(home.run_id)}
        for home in idle & self._idle:
            await self.homes.release(home)
        self._idle = idle

    async def _even_out(self, node: Node) -> None:
        """Give up some runs if other nodes have far fewer: this one was there before them, or took over from one."""
        unfinished = self._unfinished()
        held = {home.run_id: home for home in self.homes.held}
        waiting = {run_id: unfinished[run_id] for run_id in held}
        leaving = runs_to_give_up(node.id, await self._peers.living(), waiting)
        await asyncio.gather(*(self._let_go(held[run_id], "which has more runs than others") for run_id in leaving))

    async def _move(self, node: Node) -> None:
        """Hand runs over to the nodes that `tinkex cluster move` has named, each with a snapshot."""
        for home, target in await self._service.db(self._store.moves, node.id):
            try:
                if await self._service.worker.leave(home.run_id):
                    if await self.homes.hand_over(home, target):
                        logger.info("%s was handed over to node %s", home.run_id, target)
                    else:
                        logger.warning("%s stays here: node %s takes no runs any more", home.run_id, target)
            except HomeLost:
                pass  # the engine is still busy with it: the next look tries again

    async def _drain(self) -> None:
        """Give up all runs, each with a snapshot, so that other nodes need no replay."""
        homes = self.homes.held
        for at in range(0, len(homes), DRAINED_AT_ONCE):
            leaving = homes[at : at + DRAINED_AT_ONCE]
            await asyncio.gather(*(self._let_go(home, "which is draining") for home in leaving))

    async def _let_go(self, home: Home, reason: str) -> None:
        with suppress(HomeLost):  # another node has it by now
            if await self._service.worker.leave(home.run_id):
                await self.homes.release(home)
                logger.info("%s has left this node, %s", home.run_id, reason)


def _sample_ids(node_id: str) -> Callable[[], str]:
    """Return a function that names samples after their node, so that any server knows where to ask for one."""
    return lambda: f"{SAMPLE_PREFIX}{node_id}-{uuid4().hex}"
