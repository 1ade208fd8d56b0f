"""Everything a handler can reach, in one record. `build.py` puts it together; nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.clock import Clock
from tinkex.engine.base import Engine
from tinkex.server.db import Db
from tinkex.settings import ServeConfig
from tinkex.store.store import Store

if TYPE_CHECKING:
    from tinkex.server.access import Access
    from tinkex.server.catalog import Catalog
    from tinkex.server.intake import Intake
    from tinkex.server.metrics import Metrics
    from tinkex.server.sampling import Sampling
    from tinkex.server.tokenizers import Tokenizers
    from tinkex.server.waiters import Waiters
    from tinkex.server.worker import Worker


@dataclass(slots=True, kw_only=True)
class Service:
    config: ServeConfig
    clock: Clock
    store: Store
    db: Db
    engine: Engine
    catalog: Catalog
    access: Access
    intake: Intake
    worker: Worker
    waiters: Waiters
    sampling: Sampling
    tokenizers: Tokenizers
    metrics: Metrics
