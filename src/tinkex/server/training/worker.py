"""Runs training operations: picks the next (`plan`), has the engine do it (`perform`), keeps the result, wakes waiters.

One operation per run at a time, several runs at once. A failed operation fails alone. If the engine dies, what it had
runs again on the rebuilt adapter; an operation that keeps taking it down fails.
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
from tinkex.server.training.operation_runner import Done, Perform
from tinkex.server.training.residency import REPLAYED, Residency
from tinkex.server.training.run_queue import Lane, Pending
from tinkex.server.training.scheduler import Ready, Shares, choose, describe_queue
from tinkex.server.training.waiters import Outcome, Waiters
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.errors import DiskFull, Unavailable
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

WINDOW = 64
"""Operations (of different runs) that the engine has at once. It runs them together, in equal shares for tenants."""
MOST_DEATHS = 3
"""An operation that takes the engine down so often is given up. Two may be chance: somebody ends processes."""
MOST_REBUILDS = 20
EVICT = "evict"
"""The kind that stands in a lane while its adapter leaves the engine: no client asked for it."""


class Worker:
    def __init__(
        self,
        config: ServeConfig,
        clock: Clock,
        store: Store,
        db: Db,
        engine: Engine,
        waiters: Waiters,
        residency: Residency,
        perform: Perform,
        metrics: Metrics,
        catalog: Catalog,
    ) -> None:
        self._catalog = catalog
        self._config, self._clock, self._store, self._db, self._engine = config, clock, store, db, engine
        self._waiters, self._residency, self._perform, self._metrics = waiters, residency, perform, metrics
        self._lanes: dict[str, Lane] = {}
        self._loading: dict[str, asyncio.Task[Lane | None]] = {}
        self._pending: dict[str, Pending] = {}
        self._active: set[str] = set()
        """Runs whose lane has something waiting."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._shares = Shares()
        self._suspects = asyncio.Lock()
        """Held by an operation under which the engine died, while it is tried again."""
        self._wake = asyncio.Event()
        self._paused: dict[str, str] = {}
        self._is_draining = False

    # ── What is known

    @property
    def queued(self) -> int:
        return len(self._pending)

    def resident(self) -> list[str]:
        """Runs whose adapter the engine holds."""
        return self._residency.runs()

    @property
    def halt(self) -> str:
        """Why nothing new is started, if so."""
        return "the service is stopping" if self._is_draining else next(iter(self._paused.values()), "")

    def waiting_of(self, tenant: str) -> int:
        return sum(pending.tenant == tenant for pending in self._pending.values())

    def waiting(self, tenant: str) -> list[Pending]:
        """A tenant's operations that are not finished, the longest waiting first."""
        return sorted((row for row in self._pending.values() if row.tenant == tenant), key=lambda row: row.arrived)

    def pending(self, request_id: str) -> Pending | None:
        return self._pending.get(request_id)

    def queue_of(self, pending: Pending) -> tuple[str, str]:
        """Why an operation is not finished: state and reason."""
        lane, state = self._lanes[pending.run_id], self._engine.state
        paused = next(iter(self._paused.values()), "") or self.why_not_served(lane)
        return describe_queue(
            lane.ahead(pending.seq_id) if lane.running is not pending else 0,
            lane.missing(pending.seq_id) if lane.running is not pending else None,
            "" if state.is_ready else f"the engine is not ready: {state.reason}",
            paused,
        )

    def why_not_served(self, lane: Lane) -> str:
        """The service may have been started anew without the model that a run was made on."""
        name = lane.run.base_model
        if name in self._catalog.names:
            return ""
        return f"its base model {name} is not served now; start the service with --base-model {name}, and it goes on"

    def is_active(self, run_id: str) -> bool:
        """Whether a run has work. Nothing is read for it: `resume` loaded every lane that had some."""
        lane = self._lanes.get(run_id)
        return lane is not None and bool(lane.waiting or (lane.running is not None and lane.running.kind != EVICT))

    async def lane(self, run_id: str) -> Lane | None:
        """A run's lane, read from the journal when it is first asked for."""
        if (lane := self._lanes.get(run_id)) is not None:
            return lane
        if run_id not in self._loading:
            self._loading[run_id] = asyncio.create_task(self._load(run_id))
        try:
            return await asyncio.shield(self._loading[run_id])
        finally:
            if (task := self._loading.get(run_id)) is not None and task.done():
                self._loading.pop(run_id, None)

    async def _load(self, run_id: str) -> Lane | None:
        run = await self._db(self._store.get_run, run_id)
        if run is None:
            return None
        rows = await self._db(self._store.operations_of, run_id)
        if run_id not in self._lanes:
            lane = self._lanes[run_id] = Lane.restored(run, rows, self._clock.now())
            for pending in lane.waiting.values():
                self._note(pending)
            for row in rows:
                if row.state == "queued" and row.seq_id not in lane.waiting:
                    await self.fail(row.request_id, row.tenant, lane.why_late(row.seq_id), "user")
        return self._lanes[run_id]

    async def resume(self) -> int:
        """At start: everything that was accepted and not finished goes back into its lane."""
        rows = await self._db(self._store.queued)
        for run_id in dict.fromkeys(row.run_id for row in rows):
            lane = await self.lane(run_id)
            if lane is not None and (reason := self.why_not_served(lane)):
                logger.warning("operations of %s wait: %s", run_id, reason)
        return len(rows)

    # ── What comes in

    async def adopt(self, run_id: str) -> None:
        """A run that was just created."""
        await self.lane(run_id)
        self.wake()

    def enqueue(self, pending: Pending) -> None:
        self._note(pending)
        self.wake()

    def _note(self, pending: Pending) -> None:
        self._pending[pending.request_id] = pending
        self._active.add(pending.run_id)

    def wake(self) -> None:
        self._wake.set()

    def pause(self, cause: str, reason: str) -> None:
        """Start nothing new until `unpause(cause)`; waiters are told the reason."""
        if cause not in self._paused:
            logger.warning("training is paused: %s", reason)
        self._paused[cause] = reason

    def unpause(self, cause: str) -> None:
        if self._paused.pop(cause, None) is not None:
            logger.warning("training goes on")
            self.wake()

    # ── The loop

    async def run(self) -> None:
        """Until cancelled, or until drained."""
        while not self._is_draining:
            self._wake.clear()
            look_again = self._start_what_can()
            timeout = None if look_again is None else max(look_again - self._clock.now(), 0.001)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), timeout)

    def _start_what_can(self) -> float | None:
        """Start operations while there is room; say when a gap will have been waited for."""
        look_again: float | None = None
        if self._paused or self._is_draining:
            return None
        now = self._clock.now()
        ready: dict[str, Ready] = {}
        for run_id in list(self._active):
            lane = self._lanes[run_id]
            if not lane.waiting:
                self._active.discard(run_id)
                continue
            if self.why_not_served(lane):
                continue
            head, again = lane.head(now, self._config.gap_s)
            if head is not None:
                ready[run_id] = Ready(run_id, head.tenant, head.arrived)
            elif again is not None:
                look_again = again if look_again is None else min(look_again, again)
        while len(self._tasks) < WINDOW and (chosen := choose(ready.values(), self._shares)) is not None:
            del ready[chosen.run_id]
            lane = self._lanes[chosen.run_id]
            pending, _ = lane.head(now, self._config.gap_s)
            assert pending is not None
            lane.start(pending, now)
            self._shares.charge(pending.tenant, pending.cost)
            task = asyncio.create_task(self._execute(lane, pending))
            self._tasks.add(task)
            task.add_done_callback(self._finished)
        return look_again

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            logger.error("an operation ended without a word", exc_info=problem)
        self.wake()

    async def _execute(self, lane: Lane, pending: Pending) -> None:
        started = self._clock.now()
        failure: tuple[str, str] = ("", "")
        done: Done | None = None
        try:
            try:
                done = await self._attempt(lane, pending)
            except EngineFault as problem:
                failure = (str(problem), problem.category)
            except Exception as problem:
                logger.error("operation %s (%s) failed", pending.request_id, pending.kind, exc_info=problem)
                is_ours = isinstance(problem, TinkexError)
                failure = (str(problem) if is_ours else "The service failed; its log says why.", "server")
            # Cancelled means that the service ends: the row stays queued and runs after the next start.
            if done is not None:
                try:
                    await self._kept(partial(self._keep, pending, done))
                except Exception as problem:  # the store will not have it, and never will
                    done, failure = None, await self._unkept(lane, pending, problem)
            if done is not None:
                await self._after(lane, pending, done)
            else:
                await self._kept(partial(self.fail, pending.request_id, pending.tenant, *failure))
        finally:
            lane.done()
            self._pending.pop(pending.request_id, None)
        outcome = "failed" if done is None else "done"
        queue_s, seconds = started - pending.arrived, self._clock.now() - started
        self._metrics.operation(pending.kind, outcome, queue_s, seconds, pending.tokens, lane.run.base_model)

    async def _attempt(self, lane: Lane, pending: Pending) -> Done:
        """Have it done by an engine that lives; rebuild the adapter first if it is not there.

        Several operations share a death, and only one of them was its cause. They are tried again one by one, so that
        the guilty one uses up its own chances and nobody else's.
        """
        rebuilds = 0
        while True:
            alone = self._suspects if rebuilds or pending.engine_deaths else contextlib.nullcontext()
            async with alone:
                generation = self._engine.state.generation
                try:
                    await self._residency.ensure(lane)
                except EngineFault:
                    if self._engine.state.generation == generation:
                        raise
                    continue  # it died in between, and its successor knows nothing of what we told the other
                except EngineDied as problem:
                    self._residency.lose()
                    rebuilds += 1  # not this operation's doing: what is replayed has run before
                    if rebuilds >= MOST_REBUILDS:
                        raise EngineFault(
                            f"The engine died {rebuilds} times while it read the run ({problem}).", "server"
                        ) from None
                    continue
                try:
                    done = await self._perform(lane, pending)
                    break
                except EngineFault:
                    if self._residency.holds(lane.run.id):
                        raise
                except EngineDied as problem:
                    self._residency.lose()
                    pending.engine_deaths += 1
                    if pending.engine_deaths >= MOST_DEATHS:
                        raise EngineFault(
                            f"The engine died {pending.engine_deaths} times while it ran this operation ({problem}), "
                            "so it is given up; the run goes on without it. Too little memory? Try smaller batches.",
                            "server",
                        ) from None
                    logger.warning("the engine died under %s; it runs again", pending.request_id)
        pending.command = None
        return done

    async def _keep(self, pending: Pending, done: Done) -> None:
        replaced = None
        # KeyError: a write whose confirmation was lost stands already.
        with contextlib.suppress(KeyError):
            replaced = await self._db(
                lambda: self._store.finish(
                    pending.request_id,
                    at=self._clock.wall(),
                    result=done.content,
                    result_type=done.content_type,
                    checkpoint=done.checkpoint,
                    sampler=done.sampler,
                    engine_s=done.engine_s,
                    metrics=done.metrics,
                )
            )
        self._waiters.settle(pending.request_id, Outcome(pending.tenant, done.content, done.content_type))
        if replaced is not None:
            await asyncio.to_thread(self._perform.remove, replaced)

    async def _unkept(self, lane: Lane, pending: Pending, problem: Exception) -> tuple[str, str]:
        """What to tell. The engine has done what the journal does not know: it forgets the run, which is rebuilt."""
        if pending.kind in REPLAYED or pending.kind in ("load_weights", "load_model"):
            with contextlib.suppress(EngineDied, EngineFault):
                await self._residency.drop(lane.run.id)
        if isinstance(problem, ValidationError):
            return str(problem), "user"
        logger.error("the result of %s (%s) was not stored", pending.request_id, pending.kind, exc_info=problem)
        return "The result could not be stored, so the operation does not count; the service's log says why.", "server"

    async def _after(self, lane: Lane, pending: Pending, done: Done) -> None:
        """What follows a result and cannot undo it: a snapshot that fails leaves the journal, which has it all."""
        try:
            if pending.kind == "unload_model":
                lane.run = replace(lane.run, is_unloaded=True)
                await self._residency.drop(lane.run.id)
            elif pending.kind in REPLAYED:
                lane.is_changed = True
                # Its own share: when it is repeated, what it shared a micro-batch with is not.
                lane.engine_s += done.engine_s if done.own_s is None else done.own_s
                if lane.engine_s > self._config.snapshot_every_s:
                    await self._residency.snapshot(lane, pending.seq_id)
        except (TinkexError, OSError) as problem:
            logger.warning("after %s of %s: %s", pending.kind, lane.run.id, problem)

    async def _kept(self, write: Callable[[], Awaitable[None]]) -> None:
        """A result must reach the store: if the disk is full or the database away, wait and say so; lose nothing."""
        wait_s = 0.5
        while True:
            try:
                return await write()
            except (DiskFull, Unavailable, OSError) as problem:
                logger.error("a result cannot be stored; trying again in %.1f s: %s", wait_s, problem)
                self.pause("store", f"results cannot be stored: {problem}")
                await self._clock.sleep(wait_s)
                wait_s = min(wait_s * 2, 15.0)
                self.unpause("store")

    async def fail(self, request_id: str, tenant: str, error: str, category: str) -> None:
        """The operation failed for good."""
        with contextlib.suppress(KeyError):
            await self._db(lambda: self._store.fail(request_id, at=self._clock.wall(), error=error, category=category))
        self._waiters.settle(request_id, Outcome(tenant, error=error, category=category))

    # ── Leaving

    async def evict(self, run_id: str) -> bool:
        """Take an idle run out of the engine; it comes back by itself when it is used."""
        lane = self._lanes.get(run_id)
        if lane is None or lane.running is not None or lane.waiting or not self._residency.holds(run_id):
            return False
        lane.running = Pending("", run_id, lane.run.tenant, lane.ran, EVICT, self._clock.now())  # nobody starts now
        try:
            if lane.is_changed:
                await self._residency.snapshot(lane, lane.ran)
            await self._residency.drop(run_id)
        except (TinkexError, OSError) as problem:
            logger.warning("could not evict %s: %s", run_id, problem)
            return False
        finally:
            lane.done()
            self.wake()
        lane.forget(0)
        return True

    async def drain(self, seconds: float) -> None:
        """Start nothing more; let what runs come to its end, for so long."""
        self._is_draining = True
        self.wake()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._waiters.wake_all()
