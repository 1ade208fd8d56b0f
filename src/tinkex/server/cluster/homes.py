"""Where each run is at home: here, or on which other node. Claims a run whose home does not live.

What is known is remembered as long as it is sure: of runs at home here, while the node's lease holds; of others, for a
second. A wrong guess costs the client a repetition and nothing else: the fence of the store decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from tinkex.clock import Clock
from tinkex.server.cluster.node_lease import Node
from tinkex.server.cluster.own_counters import ClusterCounters
from tinkex.server.cluster.placement import node_for_run
from tinkex.server.upkeep.database_thread import Db
from tinkex.store.cluster.cluster_store import Claim, ClusterStore
from tinkex.store.errors import HomeLost
from tinkex.store.records import Home

logger = logging.getLogger("tinkex.server")

REMEMBERED_S = 1.0
"""How long the node of a run that is at home elsewhere is believed."""
MOST_REMEMBERED = 10_000


class Elsewhere(NamedTuple):
    url: str
    until: float


class Homes:
    """Knows where runs are at home, and claims those that are at home nowhere.

    `node` is None on a front, which has no runs. `forget` makes the worker forget a run.
    """

    def __init__(
        self,
        node: Node | None,
        clock: Clock,
        store: ClusterStore,
        db: Db,
        counters: ClusterCounters,
        forget: Callable[[str], Awaitable[None]],
    ) -> None:
        self._node, self._clock, self._store, self._db = node, clock, store, db
        self._counters, self._forget = counters, forget
        self._held: dict[str, Home] = {}
        """Runs that are at home here."""
        self._elsewhere: dict[str, Elsewhere] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> list[Home]:
        return list(self._held.values())

    async def find(self, run_id: str, model: str | None = None) -> str | None:
        """Return the address of the node where a run is at home; "" is here, None is nowhere.

        A run without a home that lives is claimed for a node with this base model; not if it is None.
        """
        if self._is_here(run_id):
            return ""
        now = self._clock.now()
        known = self._elsewhere.get(run_id)
        if known is not None and known.until > now:
            return known.url
        claim: Claim | None = await self._db(self._store.find_home, run_id)
        if claim is None and model is not None:
            own = self._node.id if self._node else ""
            claim = await self._db(self._store.claim, run_id, model, partial(node_for_run, own=own))
        if claim is None:
            self._let_go(run_id)
            return None
        if claim.is_new:
            self._counters.claimed()
            logger.info("%s is at home on node %s now (epoch %d)", run_id, claim.home.node, claim.home.epoch)
        if self._node is not None and claim.home.node == self._node.id:
            self._held[run_id] = claim.home
            return ""
        self._let_go(run_id)
        if len(self._elsewhere) >= MOST_REMEMBERED:
            self._elsewhere.clear()
        self._elsewhere[run_id] = Elsewhere(claim.url, now + REMEMBERED_S)
        return claim.url

    async def own(self, run_id: str) -> Home:
        """Return the right to work on a run. Raises HomeLost if it is not at home here."""
        if not self._is_here(run_id) and await self.find(run_id) != "":
            raise HomeLost(run_id)
        return self._held[run_id]

    def lose(self, home: Home) -> None:
        """Forget a run about which a write was rolled back: it is at home elsewhere, or here in a later epoch."""
        self._counters.fenced()
        logger.warning("a write about %s was refused: its home is elsewhere now", home.run_id)
        if self._held.get(home.run_id) == home:
            self._let_go(home.run_id)

    def forget_place(self, run_id: str) -> None:
        """Ask again where a run is at home: its node did not respond."""
        self._elsewhere.pop(run_id, None)

    def lose_all(self) -> None:
        """Forget every run: this node was given up."""
        for run_id in list(self._held):
            self._let_go(run_id)

    async def release(self, home: Home) -> None:
        """Let a run be at home nowhere: it has nothing to do, or this node is to have no runs."""
        if self._held.pop(home.run_id, None) is not None:
            await self._forget(home.run_id)
            await self._db(self._store.release, home)
            self._has_left(home)

    async def hand_over(self, home: Home, target: str) -> bool:
        """Give a run to another node. Return whether; if not, it stays at home here."""
        self._held.pop(home.run_id, None)
        await self._forget(home.run_id)
        is_given = bool(await self._db(self._store.hand_over, home, target))
        if is_given:
            self._has_left(home)
        return is_given

    async def look(self) -> None:
        """Note the runs that are at home here and that no request has asked for: others claim runs for this node, and
        hand them over. Without that a node that drains would keep them."""
        if self._node is not None:
            for home in await self._db(self._store.homes_of, self._node.id):
                if home.node == self._node.id:  # it may have joined anew meanwhile
                    self._held.setdefault(home.run_id, home)

    def _has_left(self, home: Home) -> None:
        """Forget a run again that a request has found here while it was leaving: polls come back at once."""
        if self._held.get(home.run_id) == home:
            self._let_go(home.run_id)

    def _is_here(self, run_id: str) -> bool:
        return self._node is not None and self._node.is_sure and run_id in self._held

    def _let_go(self, run_id: str) -> None:
        if self._held.pop(run_id, None) is not None:
            task = asyncio.create_task(self._forget_quietly(run_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forget_quietly(self, run_id: str) -> None:
        try:
            await self._forget(run_id)
        except HomeLost:
            pass  # the engine is busy with it; a request that brings it back waits for that
