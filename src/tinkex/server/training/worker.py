"""Runs training operations: picks the next one (`scheduler`), has the engine do it (`operation_runner`), stores the
result and wakes the polls that wait for it.

One operation per run at a time, several runs at once. A failed operation fails alone. If the engine dies, the
operations that it had run again on rebuilt adapters; an operation that keeps killing the engine fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from tinkex.clock import Clock
from tinkex.engine.contract import Engine, EngineDied, EngineFault
from tinkex.errors import TinkexError, ValidationError
from tinkex.server.http.metrics import Metrics
from tinkex.server.training.operation_runner import OperationRunner
from tinkex.server.training.residency import REPLAYED, Residency
from tinkex.server.training.run_queue import PendingOperation, RunQueue
from tinkex.server.training.scheduler import Shares, choose
from tinkex.server.training.waiters import OperationResult, Waiters
from tinkex.server.upkeep import folders
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.errors import DiskFull, Unavailable
from tinkex.store.records import OperationRecord
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

WINDOW = 64
"""Operations (of different runs) that the engine has at once. It runs them together, in equal shares for tenants."""
MOST_DEATHS = 3
"""An operation under which the engine died so often fails. Two deaths may be chance: administrators kill processes."""
MOST_REBUILDS = 20


class Worker:
    def __init__(
        self,
        config: ServeConfig,
        clock: Clock,
        store: Store,
        db: Db,
        engine: Engine,
        waiters: Waiters,
        metrics: Metrics,
        catalog: Catalog,
    ) -> None:
        self._config, self._clock, self._store, self._db, self._engine = config, clock, store, db, engine
        self._waiters, self._metrics, self._catalog = waiters, metrics, catalog
        self._residency = Residency(store, db, engine, config.data_dir)
        self._runner = OperationRunner(clock, store, db, engine, self._residency, config.data_dir)
        self._queues: dict[str, RunQueue] = {}
        self._loading: dict[str, asyncio.Task[RunQueue | None]] = {}
        self._pending: dict[str, PendingOperation] = {}
        self._active: set[str] = set()
        """Runs in whose queue something waits."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._shares = Shares()
        self._suspects = asyncio.Lock()
        """Held by an operation under which the engine died, while it is tried again."""
        self._wake = asyncio.Event()
        self._paused: dict[str, str] = {}
        self._is_draining = False

    # ── What is queued

    @property
    def queued(self) -> int:
        return len(self._pending)

    def resident(self) -> list[str]:
        return self._residency.runs()

    @property
    def pause_reason(self) -> str | None:
        """Why no new operation is started, if none is."""
        return "the service is stopping" if self._is_draining else next(iter(self._paused.values()), None)

    def waiting_of(self, tenant: str) -> int:
        return sum(pending.row.tenant == tenant for pending in self._pending.values())

    def waiting(self, tenant: str) -> list[PendingOperation]:
        """Return a tenant's operations that are not finished, the longest waiting first."""
        own = (pending for pending in self._pending.values() if pending.row.tenant == tenant)
        return sorted(own, key=lambda pending: pending.arrived)

    def pending(self, request_id: str) -> PendingOperation | None:
        return self._pending.get(request_id)

    def queue_of(self, pending: PendingOperation) -> tuple[str, str]:
        """Return why an operation is not finished: its queue's state, and the reason."""
        queue, engine = self._queues[pending.row.run_id], self._engine.state
        if reason := next(iter(self._paused.values()), None) or self.unserved_reason(queue):
            return "paused_capacity", reason
        if not engine.is_ready:
            return "paused_capacity", f"the engine is not ready: {engine.reason}"
        if queue.running is not pending:
            if (missing := queue.missing(pending.row.seq_id)) is not None:
                return "active", f"waits for operation {missing} of this run, which has not arrived"
            if ahead := queue.ahead(pending.row.seq_id):
                return "active", f"{ahead} operation{'s' if ahead > 1 else ''} of this run before it"
        return "active", "running or next in line"

    def unserved_reason(self, queue: RunQueue) -> str | None:
        """Return why a run cannot go on: the service may have been restarted without the run's base model."""
        name = queue.run.base_model
        if name in self._catalog.names:
            return None
        return f"its base model {name} is not served now; start the service with --base-model {name}, and it goes on"

    def is_active(self, run_id: str) -> bool:
        """Whether a run has work. Reads nothing: `resume` loaded every queue that had some."""
        queue = self._queues.get(run_id)
        return queue is not None and bool(queue.waiting or queue.running)

    async def run_queue(self, run_id: str) -> RunQueue | None:
        """Return a run's queue, read from the journal on first use; None if there is no such run."""
        if (queue := self._queues.get(run_id)) is not None:
            return queue
        if run_id not in self._loading:
            self._loading[run_id] = asyncio.create_task(self._load(run_id))
        try:
            return await asyncio.shield(self._loading[run_id])
        finally:
            if (task := self._loading.get(run_id)) is not None and task.done():
                self._loading.pop(run_id, None)

    async def _load(self, run_id: str) -> RunQueue | None:
        run = await self._db(self._store.get_run, run_id)
        if run is None:
            return None
        rows = await self._db(self._store.operations_of, run_id)
        if run_id not in self._queues:
            queue = self._queues[run_id] = RunQueue.restored(run, rows, self._clock.now())
            for pending in queue.waiting.values():
                self.enqueue(pending)
            for row in rows:
                if row.state == "queued" and row.seq_id not in queue.waiting:
                    await self.fail(row, queue.late_reason(row.seq_id), "user")
        return self._queues[run_id]

    async def resume(self) -> int:
        """Put every operation that was accepted and not finished back into its queue. Called once, at start."""
        rows = await self._db(self._store.queued)
        for run_id in dict.fromkeys(row.run_id for row in rows):
            queue = await self.run_queue(run_id)
            if queue is not None and (reason := self.unserved_reason(queue)) is not None:
                logger.warning("operations of %s wait: %s", run_id, reason)
        return len(rows)

    # ── What comes in

    def enqueue(self, pending: PendingOperation) -> None:
        """Consider an operation of a queue; the loop starts it when its turn has come."""
        self._pending[pending.row.request_id] = pending
        self._active.add(pending.row.run_id)
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def pause(self, cause: str, reason: str) -> None:
        """Start nothing new until `unpause(cause)`; polls report the reason."""
        if cause not in self._paused:
            logger.warning("training is paused: %s", reason)
        self._paused[cause] = reason

    def unpause(self, cause: str) -> None:
        if self._paused.pop(cause, None) is not None:
            logger.warning("training goes on")
            self.wake()

    # ── The loop

    async def run(self) -> None:
        """Run operations until cancelled or drained."""
        while not self._is_draining:
            self._wake.clear()
            look_again = self._start_ready()
            timeout = None if look_again is None else max(look_again - self._clock.now(), 0.001)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), timeout)

    def _start_ready(self) -> float | None:
        """Start operations while there is room. Return when the wait for a missing number is over, if there is one."""
        if self._paused or self._is_draining:
            return None
        ready, look_again = self._heads(self._clock.now())
        while len(self._tasks) < WINDOW and (pending := choose(ready.values(), self._shares)) is not None:
            row = pending.row
            del ready[row.run_id]
            queue = self._queues[row.run_id]
            queue.start(pending)
            self._shares.charge(row.tenant, row.cost_tokens)
            task = asyncio.create_task(self._run(queue, pending))
            self._tasks.add(task)
            task.add_done_callback(self._finished)
        return look_again

    def _heads(self, now: float) -> tuple[dict[str, PendingOperation], float | None]:
        """Return the operation of each run that may run now, and when to look again for the others."""
        heads: dict[str, PendingOperation] = {}
        look_again: float | None = None
        for run_id in list(self._active):
            queue = self._queues[run_id]
            if not queue.waiting:
                self._active.discard(run_id)
                continue
            if self.unserved_reason(queue) is not None:
                continue
            head, again = queue.head(now, self._config.gap_s)
            if head is not None:
                heads[run_id] = head
            elif again is not None:
                look_again = again if look_again is None else min(look_again, again)
        return heads, look_again

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an operation's task crashed", exc_info=error)
        self.wake()

    async def _run(self, queue: RunQueue, pending: PendingOperation) -> None:
        started, row = self._clock.now(), pending.row
        try:
            result = await self._result_of(queue, pending)
            # Cancelled means that the service is stopping: the row stays queued and runs after the next start.
            if result.error is None:
                try:
                    await self._retry_until_stored(partial(self._store_result, row, result))
                except Exception as error:  # the store rejects it, and always will
                    result = await self._on_store_rejected(queue, row, error)
            if result.error is None:
                await self._after_success(queue, row, result)
            else:
                await self._retry_until_stored(partial(self.fail, row, result.error, result.category))
        finally:
            queue.running = None
            self._pending.pop(row.request_id, None)
        outcome = "done" if result.error is None else "failed"
        queue_s, seconds = started - pending.arrived, self._clock.now() - started
        self._metrics.operation(row.kind, outcome, queue_s, seconds, row.tokens, queue.run.base_model)

    async def _result_of(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        row = pending.row
        try:
            return await self._run_with_engine(queue, pending)
        except EngineFault as error:
            return OperationResult(tenant=row.tenant, error=str(error), category=error.category)
        except Exception as error:
            logger.error("operation %s (%s) failed", row.request_id, row.kind, exc_info=error)
            is_ours = isinstance(error, TinkexError)
            reason = str(error) if is_ours else "The service failed; its log says why."
            return OperationResult(tenant=row.tenant, error=reason)

    async def _run_with_engine(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        """Run an operation on a live engine, with the adapter rebuilt first if it is not there.

        When the engine dies, several operations lose their work, and one of them was the cause. They are retried one at
        a time, so that the guilty one uses up its own chances and not the others'.
        """
        rebuilds = 0
        while True:
            alone = self._suspects if rebuilds or pending.engine_deaths else contextlib.nullcontext()
            async with alone:
                generation = self._engine.state.generation
                try:
                    await self._residency.ensure(queue)
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
                    result = await self._runner.run(queue, pending)
                    break
                except EngineFault:
                    if self._residency.holds(queue.run.id):
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
        pending.command = None
        return result

    async def _store_result(self, row: OperationRecord, result: OperationResult) -> None:
        replaced = None
        # KeyError: an earlier write succeeded and only its confirmation was lost.
        with contextlib.suppress(KeyError):
            replaced = await self._db(
                lambda: self._store.finish(
                    row.request_id,
                    at=self._clock.wall(),
                    result=result.content,
                    result_type=result.content_type,
                    checkpoint=result.checkpoint,
                    sampler=result.sampler,
                    engine_s=result.engine_s,
                    metrics=result.metrics,
                )
            )
        self._waiters.settle(row.request_id, result)
        if replaced is not None:
            await asyncio.to_thread(folders.remove, self._config.data_dir, replaced.folder)

    async def _on_store_rejected(self, queue: RunQueue, row: OperationRecord, error: Exception) -> OperationResult:
        """Drop the adapter so that it is rebuilt from the journal, which has no such result. Return what to report."""
        if row.kind in REPLAYED or row.kind in ("load_weights", "load_model"):
            with contextlib.suppress(EngineDied, EngineFault):
                await self._residency.drop(queue.run.id)
        if isinstance(error, ValidationError):
            return OperationResult(tenant=row.tenant, error=str(error), category="user")
        logger.error("the result of %s (%s) was not stored", row.request_id, row.kind, exc_info=error)
        reason = "The result could not be stored, so the operation does not count; the service's log says why."
        return OperationResult(tenant=row.tenant, error=reason)

    async def _after_success(self, queue: RunQueue, row: OperationRecord, result: OperationResult) -> None:
        """Do what follows a stored result. Errors are only logged: without a snapshot, the journal still has it all."""
        try:
            if row.kind == "unload_model":
                queue.run = replace(queue.run, is_unloaded=True)
                await self._residency.drop(queue.run.id)
            elif row.kind in REPLAYED:
                queue.is_changed = True
                # Its own share of a shared micro-batch: a replay repeats it without the other passes.
                queue.engine_s += result.engine_s if result.own_s is None else result.own_s
                if queue.engine_s > self._config.snapshot_every_s:
                    await self._residency.snapshot(queue, row.seq_id)
        except (TinkexError, OSError) as error:
            logger.warning("after %s of %s: %s", row.kind, queue.run.id, error)

    async def _retry_until_stored(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write to the store, however long the disk is full or the database away; training is paused meanwhile."""
        wait_s = 0.5
        while True:
            try:
                return await write()
            except (DiskFull, Unavailable, OSError) as error:
                logger.error("a result cannot be stored; trying again in %.1f s: %s", wait_s, error)
                self.pause("store", f"results cannot be stored: {error}")
                await self._clock.sleep(wait_s)
                wait_s = min(wait_s * 2, 15.0)
                self.unpause("store")

    async def fail(self, row: OperationRecord, error: str, category: str) -> None:
        """Store that an operation failed, and wake its polls."""
        at = self._clock.wall()
        with contextlib.suppress(KeyError):
            await self._db(lambda: self._store.fail(row.request_id, at=at, error=error, category=category))
        self._waiters.settle(row.request_id, OperationResult(tenant=row.tenant, error=error, category=category))

    # ── Leaving

    async def evict(self, run_id: str) -> bool:
        """Drop an idle run's adapter from the engine; it is rebuilt when the run is used again."""
        queue = self._queues.get(run_id)
        if queue is None or queue.is_busy or queue.waiting or not self._residency.holds(run_id):
            return False
        queue.is_evicting = True
        try:
            if queue.is_changed:
                await self._residency.snapshot(queue, queue.started_up_to)
            await self._residency.drop(run_id)
        except (TinkexError, OSError) as error:
            logger.warning("could not evict %s: %s", run_id, error)
            return False
        finally:
            queue.is_evicting = False
            self.wake()
        queue.forget(0)
        return True

    async def drain(self, seconds: float) -> None:
        """Start nothing more, give running operations so many seconds to finish, then cancel them."""
        self._is_draining = True
        self.wake()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._waiters.wake_all()
