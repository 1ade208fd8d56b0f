"""Knows which adapters are in the engine, and rebuilds one there: its last snapshot, then the journal after it.

A replay runs the very bytes that ran before, in the same order, on the same numbers: the state is the same to the bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from tinkex.clock import Clock
from tinkex.engine.contract import Engine, EngineDied, EngineFault, adapter_bytes
from tinkex.engine.frames import Frame
from tinkex.server.training.adapter_memory import AdapterMemory
from tinkex.server.training.run_queue import RunQueue
from tinkex.server.upkeep.base_models import BaseModels
from tinkex.server.upkeep.blob_calls import held, keep, payload
from tinkex.server.upkeep.database_thread import Db
from tinkex.store.errors import DamagedBlob
from tinkex.store.payloads import MAX_INLINE_BYTES
from tinkex.store.records import OperationRecord, RunRecord, lora_of
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

NOTES = "notes"
"""Of `OperationRecord.options`: what is shown of a pass (`pass_notes`)."""
REPLAYED = frozenset({"forward_backward", "optim_step"})
"""Kinds that change an adapter and are replayed. Loading changes it too, but a snapshot follows at once."""


async def read_command(db: Db, store: Store, row: OperationRecord) -> bytes:
    """Return an operation's command from the journal, if it is what was accepted. Raises EngineFault otherwise."""
    try:
        command = await payload(db, store, row.request_id, "command")
    except FileNotFoundError:
        command = None
    except DamagedBlob:
        raise damaged(row, "its data are not what was stored") from None
    if command is None:
        raise damaged(row, "its data are missing")
    content = (row.kind, command, row.options)
    digest = digest_of(*content) if len(command) <= MAX_INLINE_BYTES else await db.beside(digest_of, *content)
    if digest != row.digest:
        raise damaged(row, "its data are not what was accepted")
    return command


def damaged(row: OperationRecord, reason: str) -> EngineFault:
    """Log that a row of the journal is damaged, and return the error for its client."""
    logger.error(
        "operation %s (%s %d of %s) is set aside: %s", row.request_id, row.kind, row.seq_id, row.run_id, reason
    )
    return EngineFault(
        f"The service's record of operation {row.seq_id} of {row.run_id} is damaged: {reason}. It cannot run; check "
        "the service's disk, and send it again under a new number.",
        "server",
    )


async def set_aside(db: Db, store: Store, at: float, run_id: str, request_ids: list[str]) -> None:
    """Fail the operations of a run whose rows are missing or damaged, so that their clients hear of it."""
    reason = f"The service's records of run {run_id} are damaged, so this operation cannot run. Nothing was changed."
    for request_id in request_ids:
        logger.error("operation %s is set aside: the records of %s are missing or damaged", request_id, run_id)
        with contextlib.suppress(KeyError):
            await db(partial(store.fail, request_id, at=at, error=reason, category="server"))


def digest_of(kind: str, command: bytes, options: Mapping[str, Any]) -> str:
    """Return a hash of what an operation does, by which a retry, and a damaged record, is known.

    The notes about a pass are left out: it does the same without them.
    """
    does = {name: value for name, value in options.items() if name != NOTES}
    digest = hashlib.blake2b(command, digest_size=16)
    digest.update(orjson.dumps([kind, does], option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


class Residency:
    def __init__(
        self, clock: Clock, store: Store, db: Db, engine: Engine, memory: AdapterMemory, models: BaseModels
    ) -> None:
        self._store, self._db, self._engine, self._models = store, db, engine, models
        self._clock, self._memory = clock, memory
        self._resident: dict[str, int] = {}
        """Run → the engine's generation that has its adapter."""

    def holds(self, run_id: str) -> bool:
        return self._resident.get(run_id) == self._engine.state.generation

    def runs(self) -> list[str]:
        return [run_id for run_id in self._resident if self.holds(run_id)]

    async def ensure(self, queue: RunQueue, *, may_wait: bool = True) -> None:
        """Rebuild the run's adapter in the engine if it is not there. Raises what the engine raises.

        It waits until there is memory for the adapter, unless `may_wait` is false.
        """
        run_id = queue.run.id
        if self.holds(run_id):
            self._memory.touch(run_id)
            return
        await self._engine.ready()
        run = await self._db(self._store.get_run, run_id)
        if run is None:
            raise KeyError(run_id)
        queue.run = run
        await self._models.ensure(run.base_model)
        self._check_new(queue, run)
        await self._memory.reserve(run_id, run.tenant, self.size_of(run), may_wait=may_wait)
        started, generation = self._clock.now(), self._engine.state.generation
        try:
            await self._rebuild(queue, run)
        except Exception:
            await self._discard(run_id)
            raise
        self._resident[run_id] = generation
        self._memory.loaded(run_id, self._clock.now() - started)

    def _check_new(self, queue: RunQueue, run: RunRecord) -> None:
        """Reject a run that is too large for the budget. When it was accepted, its base model may not have been loaded
        yet, and nobody knew its size. A run that has trained stays: the budget may have been larger then."""
        size, budget = self.size_of(run), self._memory.budget_bytes
        if size > budget and run.snapshot is None and queue.started_up_to <= 0:
            raise EngineFault(
                f"An adapter of rank {run.rank} on {run.base_model} takes {-(-size // 10**6)} MB, more than the "
                f"{budget // 10**6} MB of --adapter-memory-mb. Use a lower rank, or train fewer layers."
            )

    def size_of(self, run: RunRecord) -> int:
        """Return the bytes of a run's adapter in the engine; 0 until an engine has said how large its layers are."""
        sizes = self._engine.state.lora_sizes.get(run.base_model, {})
        return adapter_bytes(sizes, lora_of(run))

    async def _rebuild(self, queue: RunQueue, run: RunRecord) -> None:
        run_id = run.id
        async with held(self._db, self._store, run.tenant, run.snapshot) as folder:
            await self._engine.run(_first_command(run, folder))
        replayed = 0
        for row in await self._db(self._store.operations_of, run_id, run.snapshot_seq):
            if row.state == "done" and row.kind in REPLAYED:
                command = await read_command(self._db, self._store, row)
                await self._engine.run(command, tenant=run.tenant)
                replayed += 1
        queue.is_changed = replayed > 0
        if replayed or run.snapshot is not None:
            logger.info("rebuilt %s: %s + %d operations", run_id, run.snapshot or "from its seed", replayed)

    def lose(self) -> None:
        """Note that the engine died: no adapter of it is there any more, even before its successor has started."""
        generation = self._engine.state.generation
        self._resident = {run: number for run, number in self._resident.items() if number == generation}
        self._memory.notify()

    async def snapshot(self, queue: RunQueue, seq_id: int) -> None:
        """Store the adapter's whole state; the journal up to `seq_id` is then no longer needed to rebuild it."""
        run_id = queue.run.id
        folder, folders = f"journal/snapshots/{run_id.replace(':', '_')}-{uuid4().hex[:8]}", self._store.folders
        path = str(folders.path(folder))
        await self._engine.run(Frame({"op": "snapshot", "adapter": run_id, "folder": path}))
        await keep(self._db, self._store, queue.run.tenant, folder)
        former = await self._db(self._store.set_snapshot, run_id, folder, seq_id, queue.home)
        if former is not None:
            await self._db.beside(folders.remove, former)
        queue.engine_s, queue.is_changed = 0.0, False

    async def drop(self, run_id: str) -> None:
        try:
            if self.holds(run_id):
                await self._engine.run(Frame({"op": "drop", "adapter": run_id}))
        finally:  # whatever the engine still has is replaced when the run is used again
            self._resident.pop(run_id, None)
            self._memory.release(run_id)

    async def _discard(self, run_id: str) -> None:
        """Drop what a failed rebuild has left in the engine."""
        with contextlib.suppress(EngineDied, EngineFault):
            await self._engine.run(Frame({"op": "drop", "adapter": run_id}))
        self._memory.release(run_id)


def _first_command(run: RunRecord, folder: Path) -> Frame:
    """Return the command that restores a run's last snapshot, or creates its adapter if it has none."""
    if run.snapshot is not None:
        return Frame({"op": "restore", "adapter": run.id, "folder": str(folder), "base": run.base_model})
    create = {"op": "create", "adapter": run.id, "base": run.base_model, "seed": run.seed}
    return Frame({**create, **lora_of(run)})
