"""Runs one operation on a live engine, however often the engine dies under it, or has no memory for it.

When the engine dies, several operations lose their work, and one of them was the cause. They are retried one at a time,
so that the guilty one uses up its own chances and not the others'.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from tinkex.engine.contract import Engine, EngineDied, EngineFault, OutOfMemory
from tinkex.server.training.adapter_memory import AdapterMemory
from tinkex.server.training.operation_runner import OperationRunner
from tinkex.server.training.residency import Residency
from tinkex.server.training.run_queue import PendingOperation, RunQueue
from tinkex.server.training.waiters import OperationResult

logger = logging.getLogger("tinkex.server")

MOST_DEATHS = 3
"""An operation under which the engine died so often fails. Two deaths may be chance: administrators kill processes."""
MOST_REBUILDS = 20


class EngineAttempts:
    def __init__(self, engine: Engine, residency: Residency, runner: OperationRunner, memory: AdapterMemory) -> None:
        self._engine, self._residency, self._runner, self._memory = engine, residency, runner, memory
        self._suspect_turn = asyncio.Lock()
        """Held by an operation under which the engine died, while it is tried again."""

    async def run(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        """Run an operation, with the adapter rebuilt first if it is not there.

        When the engine is out of memory, other adapters leave, more of them each time, until the operation succeeds or
        no idle one is left.
        """
        rebuilds, relief = 0, self._memory.relief(queue.run.id)
        while True:
            is_suspect = bool(rebuilds or pending.engine_deaths)
            async with self._suspect_turn if is_suspect else contextlib.nullcontext():
                generation = self._engine.state.generation
                try:
                    # It holds the lock. If it waited for memory, the runs that have it may wait for the lock.
                    await self._residency.ensure(queue, may_wait=not is_suspect)
                except OutOfMemory:
                    if not await relief.make_room():
                        raise
                    continue
                except EngineFault:
                    if self._engine.state.generation == generation:
                        raise
                    continue  # it died in between, and its successor has no adapter yet
                except EngineDied as error:
                    self._residency.lose()
                    rebuilds += 1  # not this operation's fault: what is replayed has run before
                    if rebuilds >= MOST_REBUILDS:
                        raise EngineFault(
                            f"The engine died {rebuilds} times while it rebuilt the run ({error}).", "server"
                        ) from None
                    continue
                try:
                    return await self._runner.run(queue, pending)
                except OutOfMemory:
                    if not await relief.make_room():
                        raise
                except EngineFault:
                    if self._engine.state.generation == generation:
                        raise
                except EngineDied as error:
                    self._residency.lose()
                    pending.engine_deaths += 1
                    if pending.engine_deaths >= MOST_DEATHS:
                        raise EngineFault(
                            f"The engine died {pending.engine_deaths} times while it ran this operation ({error}), "
                            "so it is given up; the run goes on without it. Too little memory? Try smaller batches.",
                            "server",
                        ) from None
                    logger.warning("the engine died under %s; it runs again", pending.row.request_id)
