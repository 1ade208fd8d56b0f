"""The queue of samples: in memory, bounded, fair between tenants. A restart loses it: polls get 410, clients retry.

`submit` is for clients that poll; `run` is for streams. Both use the same queue: the engine has a bounded number of
sequences of each tenant at once, and shares its rows between tenants by itself. So a sample never waits here for those
of another tenant.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from tinkex.clock import Clock
from tinkex.engine.contract import (
    Engine,
    EngineDied,
    EngineFault,
    ModelInfo,
    OutOfMemory,
    Sampled,
    SampleEvent,
    SampleSpec,
)
from tinkex.server.http.errors import bad_request, not_found
from tinkex.server.http.metrics import Metrics
from tinkex.server.limits.ledger import Ledger
from tinkex.server.sampling.completions import Completions
from tinkex.server.sampling.finished_samples import FinishedSamples
from tinkex.server.sampling.stream_buffer import StreamBuffer
from tinkex.server.training.waiters import wait_in, wake
from tinkex.server.upkeep.base_models import BaseModels
from tinkex.server.upkeep.blob_calls import held, while_held
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.checksums import check_files
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.records import SamplerRecord
from tinkex.store.store import Store
from tinkex.types.tensor import TensorData

logger = logging.getLogger("tinkex.server")

PREFIX = "sample-"
"""How a sample's request id begins: an unknown one was lost by a restart, which is 410 and not 404."""
NUMBER_BYTES = 32
"""What a Python number takes in memory."""
TARGET_BYTES = 56
"""What a target takes in a request: it is packed twice, and twice a Python number."""
MOST_DEATHS = 2
"""Fewer than for a training operation: a sample that kills the engine must not use up the operations' chances."""
MOST_CHECKED = 10_000
DROPPED_AT_ONCE = 500
"""Results: two milliseconds."""
MOST_EVICTED = 8
"""For a sample that runs out of memory 2, 4 and then 8 idle training runs leave the engine, and it is tried again."""
CHECKED_S = 1.0
"""How long a sampler that was looked up is used without looking again whether its weights still exist."""


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """A base model, or an adapter's weights on it."""

    info: ModelInfo
    weights: str | None = None
    folder: str | None = None
    """The weights' folder in the store; `weights` is where it lies while it is held."""


class TargetsLayout(NamedTuple):
    """The layout of a request's target tokens, without the tokens: the response has the same."""

    shape: list[int] | None
    crow: list[int] | None
    col: list[int] | None

    @classmethod
    def of(cls, targets: TensorData | None) -> TargetsLayout | None:
        if targets is None:
            return None
        return cls(targets.shape, targets.sparse_crow_indices, targets.sparse_col_indices)


@dataclass(slots=True, eq=False)
class SampleJob:
    """A sampling request on its way through the queue to the engine."""

    tenant: str
    target: SampleTarget
    spec: SampleSpec
    sink: Callable[[SampleEvent | Exception], None]
    task: asyncio.Task[int | None] | None = None
    is_cancelled: bool = False
    context: Context | None = field(default_factory=copy_context)
    """The context of its request, until it has ended: jobs are started by whatever ends before them."""

    @property
    def size_bytes(self) -> int:
        """Roughly what it takes in memory, here and in the engine, until it has ended."""
        targets = sum(map(len, self.spec.targets or ()))
        texts = sum(map(len, self.spec.stop_strings))
        return 2000 + NUMBER_BYTES * len(self.spec.prompt) + TARGET_BYTES * targets + 4 * texts


@dataclass(slots=True, eq=False)
class PolledSample:
    """A sampling request whose client polls for the result."""

    id: str
    tenant: str
    sampler_id: str
    job: SampleJob | None
    """None once it is done: its spec may be large, and its sink refers to this record, so that only a garbage
    collection would free both."""
    num_samples: int
    targets_layout: TargetsLayout | None = None
    key: object = None
    """By which a repeated request is known; None if the client sent none."""
    result: Sampled | None = None
    error: tuple[str, str] | None = None
    finished: float | None = None
    waiters: set[asyncio.Future[None]] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return self.finished is not None

    @property
    def sequence_ids(self) -> list[str]:
        return [f"{self.id}:{index}" for index in range(self.num_samples)]

    @property
    def size_bytes(self) -> int:
        """Roughly what it takes in memory once it is done: the numbers of a result are packed."""
        size = 2000
        if (layout := self.targets_layout) is not None:
            size += NUMBER_BYTES * (len(layout.crow or ()) + len(layout.col or ()))
        if (result := self.result) is None:
            return size
        return size + 500 * len(result.sequences) + NUMBER_BYTES * len(result.prompt_logprobs or ()) + result.nbytes


class Sampling:
    def __init__(
        self,
        config: ServeConfig,
        clock: Clock,
        store: Store,
        db: Db,
        engine: Engine,
        catalog: Catalog,
        metrics: Metrics,
        ledger: Ledger,
        models: BaseModels,
        relieve: Callable[[int, str | None], Awaitable[int]],
    ) -> None:
        """`models` loads base models. `relieve` evicts so many training runs from an engine that is out of memory, and
        returns how many left."""
        self._config, self._clock, self._store, self._db = config, clock, store, db
        self._engine, self._catalog, self._metrics = engine, catalog, metrics
        self._ledger, self._models, self._relieve = ledger, models, relieve
        self.new_id: Callable[[], str] = lambda: f"{PREFIX}{uuid4().hex}"
        """Names a sample. Where several servers sample, its name says which one has it."""
        self._queues: dict[str, deque[SampleJob]] = {}
        self.running = 0
        """Sequences that are in the engine."""
        self.queued = 0
        """Sequences that wait."""
        self._rows_of: dict[str, int] = {}
        """Sequences in the engine and in the queue, by tenant."""
        self._running_of: dict[str, int] = {}
        """Sequences in the engine by tenant; of one request at most as many as are sampled at the same time."""
        self._tasks: set[asyncio.Task[int | None]] = set()
        self._samples: dict[str, PolledSample] = {}
        self._by_key: dict[object, PolledSample] = {}
        self._finished = FinishedSamples()
        self.completions = Completions(clock)
        self._checked: dict[str, tuple[float, SamplerRecord, SampleTarget]] = {}
        """Sampler → when it was looked up, and what it is. The one that was looked up last is the last."""

    # ── What to sample from

    async def open(self, tenant: str, *, base_model: object = None, model_path: object = None) -> SampleTarget:
        """Return what to sample from: a base model, or saved sampler weights that this tenant may read."""
        if model_path is None:
            if base_model is None:
                raise bad_request("Name a base_model or a model_path.", "no_model")
            return SampleTarget(self._catalog.find(base_model))
        if not isinstance(model_path, str) or not model_path.startswith("tinker://"):
            raise bad_request(f"model_path {str(model_path)[:200]!r} does not begin with tinker://.", "bad_path")
        if "/weights/" in model_path:
            raise bad_request(
                f"{model_path[:200]} is a training checkpoint. Sampling needs one that was saved with "
                "save_weights_for_sampler (tinker://…/sampler_weights/…).",
                "bad_path",
            )
        saved = await self._db(self._store.get_readable_checkpoint, model_path, tenant, self._clock.wall())
        if saved is None:
            raise not_found("checkpoint", model_path)
        if saved.kind != "sampler_weights":
            raise bad_request(f"{model_path[:200]} was not saved for sampling.", "bad_path")
        try:
            async with held(self._db, self._store, tenant, saved.folder, partial(check_files, saved)):
                pass
        except FileNotFoundError:  # deleted meanwhile
            raise not_found("checkpoint", model_path) from None
        return self._target(saved.base_model, saved.folder)

    def _target(self, base_model: str, folder: str) -> SampleTarget:
        return SampleTarget(self._catalog.find(base_model), str(self._store.folders.path(folder)), folder)

    async def sampler(self, tenant: str, sampler_id: object) -> tuple[SamplerRecord, SampleTarget]:
        """Return a sampling session of this tenant, and what it samples from."""
        if not isinstance(sampler_id, str):
            raise not_found("sampling session", sampler_id)
        checked = self._checked.get(sampler_id)
        if checked is not None and self._clock.now() - checked[0] < CHECKED_S and checked[1].tenant == tenant:
            return checked[1], checked[2]
        row = await self._db(self._store.get_sampler, sampler_id)
        if row is None or row.tenant != tenant:
            raise not_found("sampling session", sampler_id)
        if row.folder is not None:
            target = self._target(row.base_model, row.folder)
        else:
            path = row.model_path
            target = await self.open(tenant, base_model=row.base_model if path is None else None, model_path=path)
        self._checked.pop(sampler_id, None)
        while len(self._checked) >= MOST_CHECKED:
            del self._checked[next(iter(self._checked))]
        self._checked[sampler_id] = (self._clock.now(), row, target)
        return row, target

    def is_used(self, sampler_id: str, seconds: float) -> bool:
        """Whether a client has asked for a sampler within so many seconds, or waits for a sample of it."""
        checked = self._checked.get(sampler_id)
        if checked is not None and self._clock.now() - checked[0] < seconds:
            return True
        return any(sample.sampler_id == sampler_id and not sample.is_done for sample in self._samples.values())

    # ── Requests whose clients poll

    def submit(
        self,
        tenant: str,
        sampler_id: str,
        target: SampleTarget,
        spec: SampleSpec,
        key: object,
        layout: TargetsLayout | None,
    ) -> PolledSample:
        """Queue a sample. The same key returns the earlier attempt, unless that failed through the service's fault."""
        known = self._by_key.get(key) if key is not None else None
        if known is not None and (known.error is None or known.error[1] == "user"):
            return known
        sample_id = self.new_id()

        def settle(event: SampleEvent | Exception) -> None:
            if isinstance(event, Sampled):
                self._settle(sample, result=event)
            elif isinstance(event, EngineFault):
                self._settle(sample, error=(str(event), event.category))
            elif isinstance(event, Exception):
                self._settle(sample, error=("The service failed to sample; its log says why.", "server"))

        job = SampleJob(tenant, target, spec, settle)
        sample = PolledSample(sample_id, tenant, sampler_id, job, spec.num_samples, layout, key)
        try:
            self._enqueue(job)
        except BaseException:
            sample.job = None  # they refer to each other
            raise
        self._samples[sample_id] = sample
        if key is not None:
            self._by_key[key] = sample
        return sample

    def find(self, tenant: str, request_id: str) -> PolledSample | None:
        sample = self._samples.get(request_id)
        return sample if sample is not None and sample.tenant == tenant else None

    async def wait(self, sample: PolledSample, seconds: float) -> None:
        """Wait for its client until it is done or the time is up."""
        if not sample.is_done:
            await wait_in(sample.waiters, seconds)
        if sample.is_done and sample.id in self._samples:
            self._finished.note_asked(sample.tenant, sample.id, self._clock.now())

    def cancel(self, sample: PolledSample) -> None:
        if sample.job is not None:
            self._cancel(sample.job)
            self._settle(sample, error=("Cancelled by the client.", "user"))

    def queue_of(self, sample: PolledSample) -> tuple[str, str]:
        state = self._engine.state
        if not state.is_ready:
            return "paused_capacity", f"the engine is not ready: {state.reason}"
        if sample.job is None or sample.job.task is None:
            return "active", f"{self.queued} sequences are waiting, {self.running} are being sampled"
        if reason := self._models.reason(sample.job.spec.base):
            return "paused_capacity", reason
        return "active", "being sampled"

    def _settle(
        self, sample: PolledSample, result: Sampled | None = None, error: tuple[str, str] | None = None
    ) -> None:
        sample.result, sample.error, sample.finished = result, error, self._clock.now()
        sample.job = None
        if error is not None:
            sample.targets_layout = None
        wake(sample.waiters)
        if sample.sampler_id:
            self.completions.add(sample.sampler_id, sample.id, "finished" if sample.error is None else "failed")
        for sample_id in self._finished.add(sample.tenant, sample.id, sample.size_bytes, sample.finished):
            self._drop(sample_id)

    async def drop_expired(self) -> None:
        """Drop the results whose time is over, in pieces: all that a busy service drew in half a minute, it may be."""
        for number, sample_id in enumerate(self._finished.expired(self._clock.now()), 1):
            self._drop(sample_id)
            if number % DROPPED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _drop(self, sample_id: str) -> None:
        dropped = self._samples.pop(sample_id)
        if self._by_key.get(dropped.key) is dropped:  # not that of a later attempt
            del self._by_key[dropped.key]
        if dropped.sampler_id:
            self.completions.forget(dropped.sampler_id, self._samples)

    # ── Requests that are streamed

    async def run(
        self, tenant: str, target: SampleTarget, spec: SampleSpec, streams: int = 1
    ) -> AsyncIterator[SampleEvent]:
        """Yield events as they come, `Sampled` last. Closing it cancels.

        `streams` of one response share what may be unread. Raises EngineFault, or RequestRejected if the queue is full
        or if events are not read.
        """

        def overflow() -> Exception:
            self._cancel(job)
            return self._ledger.rejection("max_unread_bytes", "This stream was not read and its sample is cancelled")

        events = StreamBuffer(self._config.max_unread_bytes // streams, overflow)
        job = SampleJob(tenant, target, spec, events.put)
        self._enqueue(job)
        try:
            while True:
                event = await events.get()
                yield event
                if isinstance(event, Sampled):
                    return
        finally:
            self._cancel(job)

    # ── The queue

    def _enqueue(self, job: SampleJob) -> None:
        rows, limit = job.spec.num_samples, self._config.max_queued_samples
        total, own = self.queued + self.running, self._rows_of.get(job.tenant, 0)
        # A tenant with less than an even share is let in although another has filled the queue.
        share = limit // len({*self._rows_of, job.tenant})
        if total + rows > limit and own and own + rows > share:
            raise self._ledger.rejection("max_queued_samples", f"{total} sequences are queued or being sampled")
        self._ledger.take("sample_bytes", job.tenant, job.size_bytes, "bytes of samples that wait or run")
        self._queues.setdefault(job.tenant, deque()).append(job)
        self.queued += rows
        self._rows_of[job.tenant] = own + rows
        self._pump(job.tenant)

    def _dequeue(self, job: SampleJob) -> None:
        queue = self._queues[job.tenant]
        queue.remove(job)
        if not queue:
            del self._queues[job.tenant]
        self.queued -= job.spec.num_samples

    def _release(self, job: SampleJob) -> None:
        self._ledger.give_back("sample_bytes", job.tenant, job.size_bytes)
        self._rows_of[job.tenant] -= job.spec.num_samples
        if not self._rows_of[job.tenant]:
            del self._rows_of[job.tenant]

    def _pump(self, tenant: str) -> None:
        """Start a tenant's jobs while it has few sequences in the engine: twice what is sampled at the same time."""
        window = 2 * self._config.max_rows
        while tenant in self._queues and self._running_of.get(tenant, 0) < window:
            job = self._queues[tenant][0]
            self._dequeue(job)
            self.running += job.spec.num_samples
            self._running_of[tenant] = self._running_of.get(tenant, 0) + self._rows(job)
            job.task = asyncio.create_task(self._sample(job), context=job.context)
            self._tasks.add(job.task)
            job.task.add_done_callback(partial(self._ended, job))

    def _rows(self, job: SampleJob) -> int:
        """Return how many rows of the engine a job can have: the next one must be there before its last row ends."""
        return min(job.spec.num_samples, self._config.max_rows)

    def _ended(self, job: SampleJob, task: asyncio.Task[int | None]) -> None:
        """Not in the task's own `finally`: a task that is cancelled before its first step never gets there."""
        self._tasks.discard(task)
        job.task = job.context = None  # the result is kept for a while; a task would keep its frame with it
        self.running -= job.spec.num_samples
        self._running_of[job.tenant] -= self._rows(job)
        if not self._running_of[job.tenant]:
            del self._running_of[job.tenant]
        self._release(job)
        sampled = None if task.cancelled() else task.result()
        outcome = "cancelled" if task.cancelled() else "failed" if sampled is None else "done"
        self._metrics.sample(outcome, len(job.spec.prompt), sampled or 0, job.target.info.name)
        self._pump(job.tenant)

    async def _sample(self, job: SampleJob) -> int | None:
        """Return how many tokens were drawn; None if it failed."""
        try:
            sampling = partial(self._run_with_engine, job)
            async with self._models.use(job.spec.base):
                result = await while_held(self._db, self._store, self._clock, job.tenant, job.target.folder, sampling)
        except Exception as error:
            if not isinstance(error, (EngineFault, EngineDied)):
                logger.error("a sample failed", exc_info=error)
            job.sink(error)
            return None
        job.sink(result)
        return sum(row.length for row in result.sequences)

    async def _run_with_engine(self, job: SampleJob) -> Sampled:
        deaths, has_streamed, evicted = 0, False, 1
        while True:
            try:
                await self._engine.ready()
                await self._models.ensure(job.spec.base)
                async with aclosing(self._engine.sample(replace(job.spec, tenant=job.tenant))) as events:  # type: ignore[type-var]
                    async for event in events:
                        if isinstance(event, Sampled):
                            return event
                        has_streamed = True
                        job.sink(event)
                raise EngineFault("The engine ended a sample without a result.", "server")
            except OutOfMemory:
                evicted *= 2
                if has_streamed or evicted > MOST_EVICTED or not await self._relieve(evicted, None):
                    raise
            except EngineDied as error:
                deaths += 1
                if has_streamed or deaths >= MOST_DEATHS:  # a stream cannot take back tokens that it sent
                    raise EngineFault(f"The engine died while sampling ({error}). Try again.", "server") from None

    def _cancel(self, job: SampleJob) -> None:
        if job.is_cancelled:
            return
        job.is_cancelled = True
        if job.task is not None:
            job.task.cancel()
        elif job in self._queues.get(job.tenant, ()):
            self._dequeue(job)
            self._release(job)

    def wake_all(self) -> None:
        """Let all polls respond with what is known now, because the service is shutting down."""
        for sample in self._samples.values():
            wake(sample.waiters)
        self.completions.wake_all()

    async def drain(self, seconds: float) -> None:
        """Give the samples in the engine so many seconds to finish."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
