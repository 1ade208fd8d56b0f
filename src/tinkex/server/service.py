"""The parts of a running service in one record, which every handler can reach. `main.build` puts it together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

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
from tinkex.server.training.waiters import Waiters
from tinkex.server.training.worker import Worker
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
from tinkex.server.upkeep.readiness import Readiness
from tinkex.settings import ServeConfig
from tinkex.store.store import Store


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
    importing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the engine loads an imported adapter to see whether it can be used: one at a time."""
    writing: TenantTurns = field(default_factory=TenantTurns)
    """Held while a block of a large response is written (`http.large_response`)."""
    reading: TenantTurns = field(default_factory=TenantTurns)
    """Held while a large result is read from the store, which does one thing at a time."""
