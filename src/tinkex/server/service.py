"""The parts of a running service in one record, which every handler can reach. `main.build` puts it together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinkex.clock import Clock
from tinkex.engine.contract import Engine
from tinkex.server.http.access import AccessControl
from tinkex.server.http.metrics import Metrics
from tinkex.server.limits.ledger import Ledger
from tinkex.server.limits.quotas import Quotas
from tinkex.server.limits.tenant_turns import TenantTurns
from tinkex.server.sampling.sample_queue import Sampling
from tinkex.server.sampling.tokenizer_cache import Tokenizers
from tinkex.server.training.intake import Intake
from tinkex.server.training.run_queue import PendingOperation
from tinkex.server.training.waiters import Waiters
from tinkex.server.training.worker import Worker
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
from tinkex.server.upkeep.readiness import Readiness
from tinkex.settings import ServeConfig
from tinkex.store.store import Store


class OtherServers(Protocol):
    """What a server that is one of several knows about all of them; `server.cluster` has it."""

    async def engines(self, model: str = "") -> str:
        """Say what the engines that have a base model do: "3 engines busy, 1 starting"."""

    async def capabilities(self) -> list[dict[str, Any]]:
        """Return each model once that some server has, as `get_server_capabilities` describes it."""

    async def nodes(self) -> list[dict[str, object]]:
        """Return the servers that have an engine, and what each does."""

    async def states(self, tenant: str) -> list[dict[str, Any]]:
        """Return what each other server with an engine says of itself to a tenant (`service_state`)."""

    async def urls_of(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        """Return the address of the server that works on each run, if one does."""


@dataclass(slots=True, kw_only=True)
class Service:
    config: ServeConfig
    clock: Clock
    store: Store
    db: Db
    engine: Engine
    catalog: Catalog
    access: AccessControl
    intake: Intake
    worker: Worker
    waiters: Waiters
    sampling: Sampling
    tokenizers: Tokenizers
    metrics: Metrics
    ledger: Ledger
    quotas: Quotas
    readiness: Readiness = field(default_factory=Readiness)
    offering: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the offered base models change."""
    importing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the engine loads an imported adapter to see whether it can be used: one at a time."""
    writing: TenantTurns = field(default_factory=TenantTurns)
    """Held while a block of a large response is written (`http.large_response`)."""
    reading: TenantTurns = field(default_factory=TenantTurns)
    """Held while a large result is read from the store, which does one thing at a time."""
    others: OtherServers | None = None
    """The servers of its cluster; None if this one is alone."""

    async def engines(self) -> str:
        """Say what the engines of the cluster do; "" if this server is alone."""
        return "" if self.others is None else await self.others.engines()

    def queue_of(self, pending: PendingOperation, engines: str) -> tuple[str, str]:
        """Return why an operation is not finished: its queue's state, and the reason. `engines` is from the above."""
        if not self.worker.has_queue(pending.row.run_id):  # it is being forgotten, once this operation has ended
            return "active", "running; its run is at home elsewhere, or about to be"
        state, reason = self.worker.queue_of(pending)
        if not engines:
            return state, reason
        if self.engine.state.is_ready and pending.row.run_id not in self.worker.resident():
            reason = f"{reason}; its adapter is not in the engine of its node yet"
        return state, f"{reason}; {engines}"
