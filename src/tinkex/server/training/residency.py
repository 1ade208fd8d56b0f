"""Knows which adapters are in the engine, and rebuilds one there: its last snapshot, then the journal after it.

A replay runs the very bytes that ran before, in the same order, on the same numbers: the state is the same to the bit.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from uuid import uuid4

from tinkex.engine.contract import Engine
from tinkex.engine.frames import Frame
from tinkex.server.training.run_queue import RunQueue
from tinkex.server.upkeep.database_thread import Db
from tinkex.store.records import RunRecord, lora_of
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

REPLAYED = frozenset({"forward_backward", "optim_step"})
"""Kinds that change an adapter and are replayed. Loading changes it too, but a snapshot follows at once."""


class Residency:
    def __init__(self, store: Store, db: Db, engine: Engine, data_dir: Path) -> None:
        self._store, self._db, self._engine, self._data_dir = store, db, engine, data_dir
        self._resident: dict[str, int] = {}
        """Run → the engine's generation that has its adapter."""

    def holds(self, run_id: str) -> bool:
        return self._resident.get(run_id) == self._engine.state.generation

    def runs(self) -> list[str]:
        return [run_id for run_id in self._resident if self.holds(run_id)]

    async def ensure(self, queue: RunQueue) -> None:
        """Rebuild the run's adapter in the engine if it is not there. Raises what the engine raises."""
        run_id = queue.run.id
        if self.holds(run_id):
            return
        await self._engine.ready()
        generation = self._engine.state.generation
        run = await self._db(self._store.get_run, run_id)
        if run is None:
            raise KeyError(run_id)
        queue.run = run
        await self._engine.run(self._first_command(run))
        replayed = 0
        for row in await self._db(self._store.operations_of, run_id, run.snapshot_seq):
            if row.state == "done" and row.kind in REPLAYED:
                command = await self._db(self._store.command, row.request_id)
                await self._engine.run(command, tenant=run.tenant)
                replayed += 1
        self._resident[run_id] = generation
        queue.is_changed = replayed > 0
        if replayed or run.snapshot is not None:
            logger.info("rebuilt %s: %s + %d operations", run_id, run.snapshot or "from its seed", replayed)

    def _first_command(self, run: RunRecord) -> Frame:
        """Return the command that restores a run's last snapshot, or creates its adapter if it has none."""
        if run.snapshot is not None:
            folder = str(self._data_dir / run.snapshot)
            return Frame({"op": "restore", "adapter": run.id, "folder": folder, "base": run.base_model})
        create = {"op": "create", "adapter": run.id, "base": run.base_model, "seed": run.seed}
        return Frame({**create, **lora_of(run)})

    def lose(self) -> None:
        """Note that the engine died: no adapter is there any more, even before its successor has started."""
        self._resident.clear()

    async def snapshot(self, queue: RunQueue, seq_id: int) -> None:
        """Store the adapter's whole state; the journal up to `seq_id` is then no longer needed to rebuild it."""
        run_id = queue.run.id
        folder = f"journal/snapshots/{run_id.replace(':', '_')}-{uuid4().hex[:8]}"
        await self._engine.run(Frame({"op": "snapshot", "adapter": run_id, "folder": str(self._data_dir / folder)}))
        former = await self._db(self._store.set_snapshot, run_id, folder, seq_id)
        if former is not None:
            await asyncio.to_thread(shutil.rmtree, self._data_dir / former, ignore_errors=True)
        queue.engine_s, queue.is_changed = 0.0, False

    async def drop(self, run_id: str) -> None:
        try:
            if self.holds(run_id):
                await self._engine.run(Frame({"op": "drop", "adapter": run_id}))
        finally:  # whatever the engine still has is replaced when the run is used again
            self._resident.pop(run_id, None)
