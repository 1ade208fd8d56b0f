"""Everything a handler can reach, in one record. `build.py` puts it together; nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.clock import Clock
from tinkex.engine.contract import Engine
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.store import Store

if TYPE_CHECKING:
    from tinkex.server.http.access import AccessControl
    from tinkex.server.http.metrics import Metrics
    from tinkex.server.sampling.sample_queue import Sampling
    from tinkex.server.sampling.tokenizer_cache import Tokenizers
    from tinkex.server.training.intake import Intake
    from tinkex.server.training.waiters import Waiters
    from tinkex.server.training.worker import Worker
    from tinkex.server.upkeep.catalog import Catalog


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
