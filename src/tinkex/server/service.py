"""The parts of a running service in one record, which every handler can reach. `main.build` puts it together."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.clock import Clock
from tinkex.engine.contract import Engine
from tinkex.server.http.access import AccessControl
from tinkex.server.http.metrics import Metrics
from tinkex.server.sampling.sample_queue import Sampling
from tinkex.server.sampling.tokenizer_cache import Tokenizers
from tinkex.server.training.intake import Intake
from tinkex.server.training.waiters import Waiters
from tinkex.server.training.worker import Worker
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
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
