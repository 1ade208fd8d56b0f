"""The lease of this server as a node of a cluster: it lives while it renews, and takes a new id when it was given up.

The lease has a connection and a thread of its own: a renewal never waits behind other calls of the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from uuid import uuid4

from tinkex._version import __version__
from tinkex.clock import Clock
from tinkex.errors import ConfigError
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.cluster.cluster_store import ClusterStore, NodeFacts, NodeRecord
from tinkex.store.errors import Unavailable

logger = logging.getLogger("tinkex.server")

RENEWALS = 3
"""Renewals within one lease: two may fail before others take over."""
MARGIN = 0.1
"""In this last part of its lease a node no longer relies on its own clock: it asks the database."""


class Node:
    """`facts` returns what the others are to know; `on_given_up` is called when the runs may be elsewhere,
    `on_joined` when it has a new id."""

    def __init__(self, config: ServeConfig, clock: Clock, models: list[str], facts: Callable[[], NodeFacts]) -> None:
        assert config.node_url is not None
        self._store = ClusterStore.open(config.database_url, config.data_dir, durability=config.durability)
        self._db = Db(self._store.interrupt)
        self._clock, self._models, self._facts = clock, models, facts
        self.url, self._lease_s = config.node_url, config.node_lease_s
        self._kind = "sample" if config.samples_only else "train"
        self.id = ""
        self.former_ids: set[str] = set()
        """Names that samples of this server may still have."""
        self.is_draining = False
        self.on_given_up: Callable[[], None] = lambda: None
        self.on_joined: Callable[[], None] = lambda: None
        self._sure_until = 0.0
        self._renewing = asyncio.Lock()
        self.is_announced = False
        """Whether the others know that the engine of this node takes commands."""

    @property
    def is_sure(self) -> bool:
        """Whether the lease holds by this machine's own clock: nobody else can have this node's runs.

        A process that was stopped, or cut off from the database, is not sure when it goes on.
        """
        return self._clock.now() < self._sure_until

    async def join(self) -> None:
        began, name = self._clock.now(), uuid4().hex[:16]
        facts = self._facts()
        record = NodeRecord(
            id=name,
            url=self.url,
            models=tuple(self._models),
            version=__version__,
            kind=self._kind,
            load=facts.operations,
            facts=facts,
        )
        await self._db(self._store.join, record, self._lease_s)
        self.former_ids.add(self.id)
        self.id, self.is_draining = name, False
        self._hold_since(began)
        self.on_joined()
        logger.info("this server is node %s of a cluster, at %s", name, self.url)

    async def keep(self) -> None:
        """Renew the lease until cancelled."""
        while True:
            await self._clock.sleep(self._lease_s / RENEWALS)
            try:
                await self.renew()
            except ConfigError:  # a server has the store for itself meanwhile
                raise
            except Exception as error:  # an edge: a full or read-only database must not end the nodes, one and all
                logger.warning("the lease of this node cannot be renewed; trying again: %s", error)

    async def renew(self) -> None:
        async with self._renewing:
            began, facts = self._clock.now(), self._facts()
            is_draining = await self._db(self._store.renew, self.id, self._lease_s, facts)
            if is_draining is None:
                logger.warning(
                    "node %s was given up: others may have its runs. It forgets them and joins anew", self.id
                )
                self._sure_until = 0.0
                self.on_given_up()
                await self.join()
                return
            self.is_draining = is_draining
            self.is_announced = self.is_announced or facts.is_ready
            self._hold_since(began)

    def _hold_since(self, began: float) -> None:
        """Count from before the call: the database may have renewed at any moment since."""
        self._sure_until = began + self._lease_s * (1 - MARGIN)

    async def leave(self) -> None:
        """Leave the runs to the others, if the database responds; if not, they wait until the lease has run out."""
        self._sure_until = 0.0
        try:
            await self._db(self._store.leave, self.id)
        except Unavailable as error:
            logger.warning("this node could not leave the cluster: %s", error)
        finally:
            self._db.close()
            self._store.close()
