"""Stores what operations produced, and bounds the bytes of results by tenant: beyond the limit its oldest are deleted.

A few hundred bytes of a request can ask for a result of a hundred megabytes, and results are stored for a day. Only
those in files of their own are counted; the others are as small as their rows.
"""

from __future__ import annotations

import contextlib
import logging
from itertools import islice
from typing import NamedTuple

from tinkex.clock import Clock
from tinkex.server.limits.ledger import Ledger
from tinkex.server.training.steps import last_loss
from tinkex.server.training.waiters import OperationResult
from tinkex.server.upkeep.blob_calls import kept_payload
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.errors import DiskFull, Unavailable
from tinkex.store.journal import EndedStep
from tinkex.store.payloads import MAX_INLINE_BYTES
from tinkex.store.records import CheckpointRecord, Home, OperationRecord
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")
LIMIT = "max_tenant_result_bytes"
MOST_AT_ONCE = 500
"""Results that one statement deletes: the database thread has other work too."""


class ResultFile(NamedTuple):
    request_id: str
    size: int
    at: float


class StoredResults:
    def __init__(self, config: ServeConfig, clock: Clock, store: Store, db: Db, ledger: Ledger) -> None:
        self._config, self._clock, self._store, self._db, self._ledger = config, clock, store, db, ledger
        self._files: dict[str, dict[str, ResultFile]] = {}
        """By tenant and request, oldest first."""
        self._bytes: dict[str, int] = {}

    async def restore(self) -> None:
        """Count the results of earlier processes. Called once, before any operation runs."""
        try:
            stored = await self._db(self._store.result_files)
        except Unavailable as error:  # they are deleted when they expire
            logger.warning("the stored results of earlier processes are not counted: %s", error)
            return
        for tenant, request_id, size, at in stored:
            self._count(tenant, ResultFile(request_id, size, at))

    async def finish(
        self, row: OperationRecord, result: OperationResult, home: Home | None = None
    ) -> CheckpointRecord | None:
        """Store the result of an operation. Returns a checkpoint that it replaced, whose files can be deleted."""
        replaced, at = None, self._clock.wall()
        content = await kept_payload(self._db, self._store, result.content)
        with contextlib.suppress(KeyError):  # an earlier write succeeded and only its confirmation was lost
            replaced = await self._db(
                lambda: self._store.finish(
                    row.request_id,
                    at=at,
                    result=content,
                    result_type=result.content_type,
                    checkpoint=result.checkpoint,
                    sampler=result.sampler,
                    engine_s=result.engine_s,
                    metrics=result.metrics,
                    step=EndedStep(row.run_id, row.seq_id, last_loss) if row.kind == "optim_step" else None,
                    home=home,
                )
            )
        if len(result.content) > MAX_INLINE_BYTES:
            try:
                await self._add(row.tenant, ResultFile(row.request_id, len(result.content), at))
            except (DiskFull, Unavailable, OSError) as error:  # the janitor deletes them when they expire
                logger.warning("old results of %s were not deleted: %s", row.tenant, error)
        return replaced

    async def _add(self, tenant: str, result: ResultFile) -> None:
        self._count(tenant, result)
        while (oldest := next(iter(self._files[tenant].values()))).at < result.at - self._config.result_ttl_s:
            self._forget(tenant, oldest)  # the janitor has deleted it
        while surplus := self._surplus(tenant):
            await self._db(self._store.drop_results, [file.request_id for file in surplus])
            for file in surplus:
                self._forget(tenant, file)
            self._ledger.note_exceeded(LIMIT)
            logger.info("deleted the %d oldest results of %s, to make room for newer ones", len(surplus), tenant)

    def _surplus(self, tenant: str) -> list[ResultFile]:
        """Return a tenant's oldest results that are too much, but never its newest."""
        excess, surplus = self._bytes[tenant] - self._ledger.value(LIMIT), []
        for file in islice(self._files[tenant].values(), min(len(self._files[tenant]) - 1, MOST_AT_ONCE)):
            if excess <= 0:
                break
            surplus.append(file)
            excess -= file.size
        return surplus

    def _count(self, tenant: str, result: ResultFile) -> None:
        self._files.setdefault(tenant, {})[result.request_id] = result
        self._bytes[tenant] = self._bytes.get(tenant, 0) + result.size

    def _forget(self, tenant: str, result: ResultFile) -> None:
        """Count a result no longer. Another operation of the tenant may have dropped it meanwhile."""
        if self._files[tenant].pop(result.request_id, None) is not None:
            self._bytes[tenant] -= result.size
