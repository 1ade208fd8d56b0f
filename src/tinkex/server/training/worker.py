"""Runs training operations: picks the next one (`scheduler`), has the engine do it (`operation_runner`), stores the
result and wakes the polls that wait for it.

One operation per run at a time, several runs at once. A failed operation fails alone. If the engine dies, the
operations that it had run again on rebuilt adapters; an operation that keeps killing the engine fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

from tinkex.clock import Clock
from tinkex.engine.contract import Engine, EngineDied, EngineFault, EngineUnusable
from tinkex.errors import TinkexError, ValidationError
from tinkex.server.http.metrics import Metrics
from tinkex.server.limits.ledger import Ledger
from tinkex.server.limits.quotas import Quotas
from tinkex.server.training.adapter_memory import Activity, AdapterMemory
from tinkex.server.training.engine_attempts import EngineAttempts
from tinkex.server.training.operation_runner import OperationRunner
from tinkex.server.training.queued_work import QueuedWork
from tinkex.server.training.residency import REPLAYED, Residency, set_aside
from tinkex.server.training.run_homes import RunHomes
from tinkex.server.training.run_queue import PendingOperation, QueueReasons, RunQueue
from tinkex.server.training.scheduler import Shares, choose
from tinkex.server.training.stored_results import StoredResults
from tinkex.server.training.until_stored import UntilStored
from tinkex.server.training.waiters import OperationResult, Waiters
from tinkex.server.upkeep.base_models import BaseModels
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
from tinkex.server.upkeep.machine import adapter_budget
from tinkex.settings import ServeConfig
from tinkex.store.errors import BucketAway, DiskFull, HomeLost, LeaseLost, Unavailable
from tinkex.store.records import Home, OperationRecord, RunRecord
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

WINDOW = 64
"""Operations (of different runs) that the engine has at once. It runs them together, in equal shares for tenants."""
FORGET_S = 10.0
"""How long a request waits for the end of what the engine does for a run that was elsewhere meanwhile."""


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
        quotas: Quotas,
        ledger: Ledger,
    ) -> None:
        self._config, self._clock, self._store, self._db, self._engine = config, clock, store, db, engine
        self._waiters, self._metrics, self._quotas = waiters, metrics, quotas
        self.queued_work = QueuedWork(ledger)
        self._results = StoredResults(config, clock, store, db, ledger)
        self.memory = AdapterMemory(
            adapter_budget(config.adapter_memory_mb),
            clock,
            engine,
            self._activity_of,
            partial(self.evict, for_room=True),
            self.wake,
        )
        self.models = BaseModels(config, clock, engine, catalog, self._evict_model, self.wake)
        self._residency = Residency(clock, store, db, engine, self.memory, self.models)
        runner = OperationRunner(clock, store, db, engine, self._residency, quotas)
        self._attempts = EngineAttempts(engine, self._residency, runner, self.memory)
        self._queues: dict[str, RunQueue] = {}
        self._known: WeakValueDictionary[str, RunQueue] = WeakValueDictionary()
        """Every queue that something refers to: a request may still use a queue that was forgotten meanwhile."""
        self._loading: dict[str, asyncio.Task[RunQueue | None]] = {}
        self._forgetting: dict[str, asyncio.Task[None]] = {}
        self.homes: RunHomes | None = None
        """Which runs this server may work on, where several servers share the store."""
        self._pending: dict[str, PendingOperation] = {}
        self._active: set[str] = set()
        """Runs in whose queue something waits."""
        self._tasks: dict[asyncio.Task[None], str] = {}
        """Operations that run, and their runs."""
        self._shares = Shares()
        self._wake = asyncio.Event()
        self._paused: dict[str, str] = {}
        self.reasons = QueueReasons(engine, catalog, self.models, self._paused)
        self._until_stored = UntilStored(clock, self)
        self._is_draining = False

    # ── What is queued

    @property
    def queued(self) -> int:
        return len(self._pending)

    def resident(self) -> list[str]:
        return self._residency.runs()

    def adapter_size(self, run: RunRecord) -> int:
        return self._residency.size_of(run)

    @property
    def pause_reason(self) -> str | None:
        """Why no new operation is started, if none is."""
        return "the service is stopping" if self._is_draining else next(iter(self._paused.values()), None)

    def waiting(self, tenant: str | None = None) -> list[PendingOperation]:
        """Return a tenant's operations that are not finished, or everybody's, the longest waiting first."""
        own = (pending for pending in self._pending.values() if tenant in (None, pending.row.tenant))
        return sorted(own, key=lambda pending: pending.arrived)

    def pending(self, request_id: str) -> PendingOperation | None:
        return self._pending.get(request_id)

    def queue_of(self, pending: PendingOperation) -> tuple[str, str]:
        """Return why an operation is not finished: its queue's state, and the reason."""
        return self.reasons.of(self._queues[pending.row.run_id], pending)

    def has_work_on(self, base_model: str) -> bool:
        return any(self.models.name_of(self._queues[run_id].run.base_model) == base_model for run_id in self._active)

    def is_active(self, run_id: str) -> bool:
        """Whether a run has work. Reads nothing: `resume` loaded every queue that had some."""
        queue = self._queues.get(run_id)
        return queue is not None and bool(queue.waiting or queue.running)

    async def home(self, run_id: str) -> Home | None:
        """Return the right to work on a run; None if the store is this server's alone. Raises if it is another's."""
        return None if self.homes is None else await self.homes.own(run_id)

    async def run_queue(self, run_id: str) -> RunQueue | None:
        """Return a run's queue, read from the journal on first use; None if there is no such run."""
        if self.homes is not None:
            try:
                home = await self.homes.own(run_id)
            except HomeLost:
                if await self._db(self._store.get_run, run_id) is None:
                    return None
                raise
            known = self._queues.get(run_id) or self._known.get(run_id)
            if (known is not None and known.home != home) or run_id in self._forgetting:
                await self.forget(run_id)  # it was elsewhere in between
        if (queue := self._queues.get(run_id) or self._known.get(run_id)) is not None:
            self._queues[run_id] = queue
            queue.used_at = self._clock.now()
            return queue
        if run_id not in self._loading:
            self._loading[run_id] = asyncio.create_task(self._load(run_id))
        try:
            return await asyncio.shield(self._loading[run_id])
        finally:
            if (task := self._loading.get(run_id)) is not None and task.done():
                self._loading.pop(run_id, None)

    async def _load(self, run_id: str) -> RunQueue | None:
        home = await self.home(run_id)  # before the rows: from now on nobody else changes them
        run = await self._db(self._store.get_run, run_id)
        if run is None:
            return None
        rows = await self._db(self._store.recent_operations, run_id)
        if run_id not in self._queues:
            queue = self._queues[run_id] = self._known[run_id] = RunQueue.restored(run, rows, self._clock.now(), home)
            queue.used_at = self._clock.now()
            for pending in queue.waiting.values():
                self.queued_work.restore(pending.row.tenant)
                self.enqueue(pending)
            for row in rows:
                if row.state == "queued" and row.seq_id not in queue.waiting:
                    await self.fail(queue, row, queue.late_reason(row.seq_id), "user")
        return self._queues[run_id]

    async def resume(self) -> int:
        """Put every operation that was accepted and not finished back into its queue. Called once, at start."""
        resumed = 0
        await self._results.restore()
        if self.homes is not None:  # only runs without a home that lives, and their requests find them
            return 0
        for run_id, request_ids in (await self._db(self._store.queued_ids)).items():
            try:
                queue = await self.run_queue(run_id)
            except (DiskFull, Unavailable, LeaseLost):
                raise
            except Exception as error:  # an edge: one damaged run must not keep all others from starting
                logger.error("the rows of %s cannot be read", run_id, exc_info=error)
                queue = None
            if queue is None:
                await set_aside(self._db, self._store, self._clock.wall(), run_id, request_ids)
                continue
            resumed += len(request_ids)
            if (reason := self.reasons.unserved(queue)) is not None:
                logger.warning("operations of %s wait: %s", run_id, reason)
        return resumed

    # ── What comes in

    def enqueue(self, pending: PendingOperation) -> None:
        """Consider an operation of a queue; the loop starts it when its turn has come."""
        self._pending[pending.row.request_id] = pending
        self._queues.setdefault(pending.row.run_id, self._known[pending.row.run_id])
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
        most = WINDOW + self.memory.waiting  # those that wait for memory keep nothing out of the engine
        while len(self._tasks) < most and (pending := choose(ready.values(), self._shares)) is not None:
            row = pending.row
            del ready[row.run_id]
            queue = self._queues[row.run_id]
            queue.start(pending)
            self.models.enter(queue.run.base_model)
            self._shares.charge(row.tenant, row.cost_tokens)
            task = asyncio.create_task(self._run(queue, pending), context=pending.context)
            self._tasks[task] = row.run_id
            task.add_done_callback(self._finished)
        return look_again

    def _heads(self, now: float) -> tuple[dict[str, PendingOperation], float | None]:
        """Return the operation of each run that may run now, and when to look again for the others."""
        heads: dict[str, PendingOperation] = {}
        look_again: float | None = None
        first = self.memory.first()
        for run_id in list(self._active):
            queue = self._queues[run_id]
            if not queue.waiting:
                self._active.discard(run_id)
                continue
            if self.reasons.unserved(queue) or self.memory.must_wait(run_id, queue.run.tenant, first):
                continue
            head, again = queue.head(now, self._config.gap_s)
            if head is not None and not self.models.is_open(queue.run.base_model):
                self.models.want(queue.run.base_model)  # it wakes the loop once it is there
            elif head is not None:
                heads[run_id] = head
            elif again is not None:
                look_again = again if look_again is None else min(look_again, again)
        return heads, look_again

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an operation's task crashed", exc_info=error)
        self.wake()

    async def _run(self, queue: RunQueue, pending: PendingOperation) -> None:
        started, row = self._clock.now(), pending.row
        try:
            result = await self._until_stored(partial(self._result_of, queue, pending), pending)
            # Cancelled means that the service is stopping: the row stays queued and runs after the next start.
            if result.error is None:
                try:
                    await self._until_stored(partial(self._store_result, queue, row, result), pending)
                except HomeLost:
                    raise
                except Exception as error:  # the store rejects it, and always will
                    result = await self._on_store_rejected(queue, row, error)
            if result.error is None:
                await self._after_success(queue, row, result)
            else:
                await self._until_stored(partial(self.fail, queue, row, result.error, result.category), pending)
        except HomeLost:
            self._quotas.release((row.run_id, row.seq_id))  # the new home reserves for itself
            self.lose(queue)  # nothing is reported, because nothing is known: the new home runs it
            return
        finally:
            queue.running = None
            self.models.leave(queue.run.base_model)
            self._pending.pop(row.request_id, None)
            self.memory.notify()
            self.queued_work.finished(pending)
        outcome = "done" if result.error is None else "failed"
        queue_s, seconds = started - pending.arrived, self._clock.now() - started
        self._metrics.operation(row.kind, outcome, queue_s, seconds, row.tokens, queue.run.base_model)

    async def _result_of(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        row = pending.row
        try:
            return await self._attempts.run(queue, pending)
        except EngineUnusable as error:
            raise asyncio.CancelledError(str(error)) from None  # the service ends: it runs after the next start
        except EngineFault as error:
            return OperationResult(tenant=row.tenant, error=str(error), category=error.category)
        except (Unavailable, BucketAway, HomeLost):
            raise  # it runs again when the store responds: whatever it did to the adapter, a repetition does again
        except Exception as error:
            logger.error("operation %s (%s) failed", row.request_id, row.kind, exc_info=error)
            is_ours = isinstance(error, TinkexError)
            reason = str(error) if is_ours else "The service failed; its log says why."
            return OperationResult(tenant=row.tenant, error=reason)

    async def _store_result(self, queue: RunQueue, row: OperationRecord, result: OperationResult) -> None:
        replaced = await self._results.finish(row, result, queue.home)
        self._settle(row, result)
        if replaced is not None:
            await self._db.beside(self._store.folders.remove, replaced.folder)

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
            if isinstance(error, HomeLost):
                self.lose(queue)
            if isinstance(error, BucketAway):
                queue.engine_s = 0.0  # not after every operation: each would wait for the bucket

    async def fail(self, queue: RunQueue, row: OperationRecord, error: str, category: str) -> None:
        """Store that an operation failed, and wake its polls."""
        at = self._clock.wall()
        with contextlib.suppress(KeyError):
            fail = partial(self._store.fail, row.request_id, at=at, error=error, category=category, home=queue.home)
            await self._db(fail)
        self._settle(row, OperationResult(tenant=row.tenant, error=error, category=category))

    def _settle(self, row: OperationRecord, result: OperationResult) -> None:
        self._quotas.release((row.run_id, row.seq_id))  # first: the client may save again at once
        self._waiters.settle(row.request_id, result)

    # ── Leaving

    def _activity_of(self, run_id: str) -> Activity:
        queue = self._queues.get(run_id)
        if queue is None or queue.is_busy:
            return Activity.BUSY
        return Activity.WAITING if queue.waiting else Activity.IDLE

    async def evict(self, run_id: str, *, for_room: bool = False) -> bool:
        """Drop an idle run's adapter from the engine; it is rebuilt when the run is used again.

        `for_room`: memory is short. A run with work leaves too, and without a snapshot if none can be written."""
        queue = self._queues.get(run_id)
        if queue is None or queue.is_busy or not self._residency.holds(run_id) or (queue.waiting and not for_room):
            return False
        queue.is_evicting = True
        try:
            if queue.is_changed:
                try:
                    await self._residency.snapshot(queue, queue.started_up_to)
                except (TinkexError, OSError) as error:
                    if not for_room or isinstance(error, EngineDied):
                        raise
                    logger.warning("no snapshot of %s, which leaves the engine: %s", run_id, error)
            await self._residency.drop(run_id)
        except (TinkexError, OSError) as error:
            logger.warning("could not evict %s: %s", run_id, error)
            if isinstance(error, HomeLost):
                self.lose(queue)
            return False
        finally:
            queue.is_evicting = False
            self.wake()
        queue.forget(0)
        return True

    async def _evict_model(self, name: str) -> bool:
        """Evict the runs on a base model, which is about to leave the engine. Return whether none is there."""
        bases = {run_id: self.models.name_of(queue.run.base_model) for run_id, queue in self._queues.items()}
        return all([await self.evict(run_id, for_room=True) for run_id in self.resident() if bases.get(run_id) == name])

    def forget_idle_queues(self) -> int:
        """Forget the queues of runs that are not in the engine and were not used lately; the journal has them."""
        since = self._clock.now() - self._config.idle_session_s
        idle = [
            run_id
            for run_id, queue in self._queues.items()
            if queue.used_at < since and not queue.waiting and not queue.is_busy and not self._residency.holds(run_id)
        ]
        for run_id in idle:
            del self._queues[run_id]
            self._active.discard(run_id)
        return len(idle)

    def has_queue(self, run_id: str) -> bool:
        return run_id in self._queues

    async def leave(self, run_id: str) -> bool:
        """Let a run's operation end, start no other, evict it. Return whether it can be elsewhere: then `forget` it."""
        if (queue := self._queues.get(run_id)) is None:
            return True
        queue.is_evicting = True  # nothing of it starts
        try:
            if tasks := [task for task, busy in self._tasks.items() if busy == run_id]:
                await asyncio.wait(tasks, timeout=self._config.drain_s)
        finally:
            queue.is_evicting = False
        queue.is_evicting = not self._residency.holds(run_id) or await self.evict(run_id, for_room=True)
        return queue.is_evicting

    def knows(self, queue: RunQueue) -> bool:
        """Whether a queue was not forgotten since a request got it."""
        return self._known.get(queue.run.id) is queue

    def lose(self, queue: RunQueue) -> None:
        """Note that a write about a run was rolled back: another server has it."""
        assert self.homes is not None and queue.home is not None
        self.homes.lose(queue.home)

    async def forget(self, run_id: str) -> None:
        """Forget a run that is at home elsewhere by now. Raises HomeLost if the engine has been busy with it for long.

        What runs there ends first, and its result is refused: nothing old is there if the run comes back."""
        if run_id not in self._forgetting:
            self._forgetting[run_id] = asyncio.create_task(self._forget(run_id))
        await asyncio.wait([self._forgetting[run_id]], timeout=FORGET_S)
        if run_id in self._forgetting:
            raise HomeLost(run_id)

    async def _forget(self, run_id: str) -> None:
        try:
            queue, known = self._queues.pop(run_id, None), self._known.pop(run_id, None)
            self._active.discard(run_id)
            if (queue := queue or known) is None:
                return
            waiting, running = list(queue.waiting.values()), queue.running
            queue.waiting.clear()
            for pending in waiting:
                self._pending.pop(pending.row.request_id, None)
                self.queued_work.finished(pending)
                self._quotas.release((run_id, pending.row.seq_id))
            self._waiters.let_go(pending.row.request_id for pending in waiting)
            if tasks := [task for task, busy in self._tasks.items() if busy == run_id]:
                await asyncio.wait(tasks)
            self._waiters.let_go([] if running is None else [running.row.request_id])
            with contextlib.suppress(EngineDied, EngineFault):
                await self._residency.drop(run_id)
        finally:
            del self._forgetting[run_id]

    async def drain(self, seconds: float) -> None:
        """Start nothing more, give running operations so many seconds to finish, then cancel them."""
        self._is_draining = True
        self.wake()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.models.close()
        self._waiters.wake_all()
