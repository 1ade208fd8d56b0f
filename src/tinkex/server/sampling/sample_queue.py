"""Samples: in memory, bounded, fair between tenants. A restart loses them; the client is told 410 and asks again.

`submit` is for clients that poll; `run` is for streams. Both pass the same queue: the tenant that was served the fewest
tokens is next, and the engine has a bounded number of sequences at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal
from uuid import uuid4

from tinkex.clock import Clock
from tinkex.engine.contract import Engine, EngineDied, EngineFault, ModelInfo, Sampled, SampleEvent, SampleSpec
from tinkex.server.http.errors import bad_request, not_found, too_many_requests
from tinkex.server.http.metrics import Metrics
from tinkex.server.training.scheduler import Shares
from tinkex.server.upkeep.catalog import Catalog
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.records import SamplerRecord
from tinkex.store.store import Store
from tinkex.types.tensor import TensorData

logger = logging.getLogger("tinkex.server")

PREFIX = "sample-"
"""How a sample's request id begins: an unknown one was lost with a restart, which is 410 and not 404."""
KEPT_S = 900.0
KEPT_BYTES = 256 << 20
NUMBER_BYTES = 32
PAIR_BYTES = 128
MOST_SAMPLERS = 1000
"""Samplers whose finished requests are known by number; those that finished something last."""
MOST_DEATHS = 2
"""Fewer than a training operation has: a sample that takes the engine down must not use up their chances."""
CHECKED_S = 1.0
"""How long a sampler is trusted to still have its weights."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to sample from."""

    info: ModelInfo
    weights: str | None = None
    model_path: str | None = None


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the queue to the engine."""

    tenant: str
    target: Target
    spec: SampleSpec
    sink: Callable[[SampleEvent | Exception], None]
    task: asyncio.Task[int | None] | None = None
    is_cancelled: bool = False

    @property
    def cost_tokens(self) -> int:
        return len(self.spec.prompt) + self.spec.num_samples * self.spec.max_tokens


@dataclass(slots=True, eq=False)
class Sample:
    """A request whose result is polled for."""

    id: str
    tenant: str
    sampler_id: str
    job: Job
    targets_layout: TensorData | None = None
    """The caller's target tokens: the answer has their layout."""
    result: Sampled | None = None
    error: tuple[str, str] | None = None
    finished: float | None = None
    waiters: set[asyncio.Future[None]] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return self.finished is not None

    @property
    def sequence_ids(self) -> list[str]:
        return [f"{self.id}:{index}" for index in range(self.job.spec.num_samples)]

    @property
    def size_bytes(self) -> int:
        """What it takes in memory, roughly: Python's own numbers and tuples, not theirs on the wire."""
        size = 2000 + NUMBER_BYTES * len(self.job.spec.prompt)
        if (found := self.result) is None:
            return size
        numbers = sum(2 * len(row.tokens) for row in found.sequences) + len(found.prompt_logprobs or ())
        numbers += sum(len(row) for row in found.targets or ())
        ranked = [*(row.topk or () for row in found.sequences), found.topk_prompt or (), found.alternatives or ()]
        pairs = sum(len(place or ()) for places in ranked for place in places)
        return size + NUMBER_BYTES * numbers + PAIR_BYTES * pairs


class Completions:
    """What finished of one sampler, in order, for clients that ask for many results at once."""

    def __init__(self, first: int) -> None:
        self.first = first
        """The cursor of the first one that is remembered."""
        self.ids: deque[tuple[str, Literal["finished", "failed"]]] = deque()
        self.waiters: set[asyncio.Future[None]] = set()

    def add(self, request_id: str, state: Literal["finished", "failed"]) -> None:
        self.ids.append((request_id, state))
        while len(self.ids) > 20_000:
            self.ids.popleft()
            self.first += 1
        wake(self.waiters)


def wake(waiters: set[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


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
    ) -> None:
        self._config, self._clock, self._store, self._db = config, clock, store, db
        self._engine, self._catalog, self._metrics = engine, catalog, metrics
        self._data_dir = Path(config.data_dir)
        self._queues: dict[str, deque[Job]] = {}
        self._shares = Shares()
        self._rows = 0
        """Sequences that the engine has now."""
        self._queued_rows = 0
        self._held: dict[str, int] = {}
        """Both, by tenant."""
        self._tasks: set[asyncio.Task[int | None]] = set()
        self._samples: OrderedDict[str, Sample] = OrderedDict()
        self._by_key: dict[object, Sample] = {}
        self._keys: dict[str, object] = {}
        self._kept_bytes = 0
        self._completions: OrderedDict[str, Completions] = OrderedDict()
        self._checked: dict[str, tuple[float, SamplerRecord, Target]] = {}

    # ── What to sample from

    async def open(self, tenant: str, *, base_model: object = None, model_path: object = None) -> Target:
        """A base model, or saved sampler weights that this tenant may read."""
        if model_path is None:
            if base_model is None:
                raise bad_request("Name a base_model or a model_path.", "no_model")
            return Target(self._catalog.find(base_model))
        if not isinstance(model_path, str) or not model_path.startswith("tinker://"):
            raise bad_request(f"model_path {str(model_path)[:200]!r} does not begin with tinker://.", "bad_path")
        if "/weights/" in model_path:
            raise bad_request(
                f"{model_path[:200]} is a training checkpoint. Sampling needs one that was saved with "
                "save_weights_for_sampler (tinker://…/sampler_weights/…).",
                "bad_path",
            )
        found = await self._db(self._store.get_readable_checkpoint, model_path, tenant, self._clock.wall())
        if found is None:
            raise not_found("checkpoint", model_path)
        if found.kind != "sampler_weights":
            raise bad_request(f"{model_path[:200]} was not saved for sampling.", "bad_path")
        return Target(self._catalog.find(found.base_model), str(self._data_dir / found.folder), model_path)

    async def sampler(self, tenant: str, sampler_id: object) -> tuple[SamplerRecord, Target]:
        """A sampling session of this tenant, and what it samples from."""
        if not isinstance(sampler_id, str):
            raise not_found("sampling session", sampler_id)
        checked = self._checked.get(sampler_id)
        if checked is not None and self._clock.now() - checked[0] < CHECKED_S and checked[1].tenant == tenant:
            return checked[1], checked[2]
        row = await self._db(self._store.get_sampler, sampler_id)
        if row is None or row.tenant != tenant:
            raise not_found("sampling session", sampler_id)
        if row.folder is not None:
            target = Target(self._catalog.find(row.base_model), str(self._data_dir / row.folder))
        else:
            path = row.model_path
            target = await self.open(tenant, base_model=row.base_model if path is None else None, model_path=path)
        if len(self._checked) > 10_000:
            self._checked.clear()
        self._checked[sampler_id] = (self._clock.now(), row, target)
        return row, target

    # ── Requests that are polled for

    def submit(
        self, tenant: str, sampler_id: str, target: Target, spec: SampleSpec, key: object, layout: TensorData | None
    ) -> Sample:
        """Queue it; the same key finds the earlier attempt unless that one failed through no fault of the caller."""
        known = self._by_key.get(key) if key is not None else None
        if known is not None and (known.error is None or known.error[1] == "user"):
            return known
        sample_id = f"{PREFIX}{uuid4().hex}"

        def settle(event: SampleEvent | Exception) -> None:
            if isinstance(event, Sampled):
                sample.result = event
                self._settled(sample)
            elif isinstance(event, Exception):
                sample.error = _told(event)
                self._settled(sample)

        sample = Sample(sample_id, tenant, sampler_id, Job(tenant, target, spec, settle), layout)
        self._enqueue(sample.job)
        self._samples[sample_id] = sample
        if key is not None:
            self._by_key[key] = sample
            self._keys[sample_id] = key
        return sample

    def find(self, tenant: str, request_id: str) -> Sample | None:
        found = self._samples.get(request_id)
        return found if found is not None and found.tenant == tenant else None

    async def wait(self, sample: Sample, seconds: float) -> None:
        """Until it is done, or the time is up."""
        if not sample.is_done:
            await _wait(sample.waiters, seconds)

    async def completed(
        self, sampler_id: str, cursor: int, seconds: float
    ) -> tuple[list[tuple[str, Literal["finished", "failed"]]], int]:
        """What finished since the cursor, waiting for something if nothing did."""
        done = self._completions_of(sampler_id)
        if cursor > done.first + len(done.ids) or cursor < 0:
            cursor = done.first  # a cursor of an earlier life: begin anew, the client knows what it has
        if cursor >= done.first + len(done.ids):
            await _wait(done.waiters, seconds)
        start = max(cursor - done.first, 0)
        return list(done.ids)[start:], done.first + len(done.ids)

    def cancel(self, sample: Sample) -> None:
        if not sample.is_done:
            self._cancel(sample.job)
            sample.error = ("Cancelled by the client.", "user")
            self._settled(sample)

    def queue_of(self, sample: Sample) -> tuple[str, str]:
        state = self._engine.state
        if not state.is_ready:
            return "paused_capacity", f"the engine is not ready: {state.reason}"
        if sample.job.task is None:
            return "active", f"{self._queued_rows} sequences are waiting, {self._rows} are being sampled"
        return "active", "being sampled"

    def _settled(self, sample: Sample) -> None:
        sample.finished = self._clock.now()
        wake(sample.waiters)
        if sample.sampler_id:
            self._completions_of(sample.sampler_id).add(sample.id, "finished" if sample.error is None else "failed")
        self._kept_bytes += sample.size_bytes
        self._forget()

    def _completions_of(self, sampler_id: str) -> Completions:
        if sampler_id not in self._completions:
            # Cursors grow with the time of day: one from before a restart, or before this was forgotten, is below all.
            self._completions[sampler_id] = Completions(int(self._clock.wall() * 1e6))
        self._completions.move_to_end(sampler_id)
        while len(self._completions) > MOST_SAMPLERS:
            oldest = next(iter(self._completions))
            if self._completions[oldest].waiters:
                break
            del self._completions[oldest]
        return self._completions[sampler_id]

    def _forget(self) -> None:
        """Drop results that nobody came for, oldest first, when they are old or too many."""
        now = self._clock.now()
        while self._samples:
            oldest = next(iter(self._samples.values()))
            if oldest.finished is None:
                if self._kept_bytes <= KEPT_BYTES:
                    return
                self._samples.move_to_end(oldest.id)  # still at work: look at the next
                if all(not sample.is_done for sample in self._samples.values()):
                    return
                continue
            if self._kept_bytes <= KEPT_BYTES and now - oldest.finished < KEPT_S:
                return
            del self._samples[oldest.id]
            self._kept_bytes -= oldest.size_bytes
            self._by_key.pop(self._keys.pop(oldest.id, None), None)

    # ── Requests that are streamed

    async def run(self, tenant: str, target: Target, spec: SampleSpec) -> AsyncIterator[SampleEvent]:
        """Events as they come, `Sampled` last. Closing it cancels. Raises EngineFault, or RequestRejected if full."""
        events: asyncio.Queue[SampleEvent | Exception] = asyncio.Queue()
        job = Job(tenant, target, spec, events.put_nowait)
        self._enqueue(job)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Sampled):
                    return
        finally:
            self._cancel(job)

    # ── The queue

    @property
    def queued(self) -> int:
        return self._queued_rows

    @property
    def running(self) -> int:
        return self._rows

    def _enqueue(self, job: Job) -> None:
        rows, limit = job.spec.num_samples, self._config.max_queued_samples
        total, own = self._queued_rows + self._rows, self._held.get(job.tenant, 0)
        # Who has less than an even share is let in although another tenant has filled the queue.
        share = limit // len({*self._held, job.tenant})
        if total + rows > limit and own and own + rows > share:
            raise too_many_requests(
                f"{total} sequences are queued or being sampled, and the limit is {limit} "
                "(--max-queued-samples). Ask again in a moment.",
                "too_many_samples",
            )
        self._queues.setdefault(job.tenant, deque()).append(job)
        self._queued_rows += rows
        self._held[job.tenant] = own + rows
        self._pump()

    def _release(self, job: Job) -> None:
        self._held[job.tenant] -= job.spec.num_samples
        if not self._held[job.tenant]:
            del self._held[job.tenant]

    def _pump(self) -> None:
        """Hand jobs to the engine while it has room."""
        window = 2 * self._config.max_rows
        while self._queues and (self._rows < window):
            tenant = self._shares.pick(self._queues)
            queue = self._queues[tenant]
            job = queue.popleft()
            if not queue:
                del self._queues[tenant]
            self._queued_rows -= job.spec.num_samples
            self._shares.charge(tenant, job.cost_tokens)
            self._rows += job.spec.num_samples
            job.task = asyncio.create_task(self._sample(job))
            self._tasks.add(job.task)
            job.task.add_done_callback(partial(self._ended, job))

    def _ended(self, job: Job, task: asyncio.Task[int | None]) -> None:
        """Not at the end of the task itself: one that is cancelled before its first step never comes to its end."""
        self._tasks.discard(task)
        self._rows -= job.spec.num_samples
        self._release(job)
        sampled = None if task.cancelled() else task.result()
        outcome = "cancelled" if task.cancelled() else "failed" if sampled is None else "done"
        self._metrics.sample(outcome, len(job.spec.prompt), sampled or 0, job.target.info.name)
        self._pump()

    async def _sample(self, job: Job) -> int | None:
        """How many tokens were drawn; None if it failed."""
        try:
            result = await self._attempt(job)
        except Exception as problem:
            if not isinstance(problem, (EngineFault, EngineDied)):
                logger.error("a sample failed", exc_info=problem)
            job.sink(problem)
            return None
        job.sink(result)
        return sum(len(row.tokens) for row in result.sequences)

    async def _attempt(self, job: Job) -> Sampled:
        deaths, said = 0, False
        while True:
            try:
                await self._engine.ready()
                async with aclosing(self._engine.sample(replace(job.spec, tenant=job.tenant))) as events:  # type: ignore[type-var]
                    async for event in events:
                        if isinstance(event, Sampled):
                            return event
                        said = True
                        job.sink(event)
                raise EngineFault("The engine ended a sample without a result.", "server")
            except EngineDied as problem:
                deaths += 1
                if said or deaths >= MOST_DEATHS:  # a stream cannot take back what it said
                    raise EngineFault(f"The engine died while sampling ({problem}). Ask again.", "server") from None

    def _cancel(self, job: Job) -> None:
        if job.is_cancelled:
            return
        job.is_cancelled = True
        if job.task is not None:
            job.task.cancel()
        elif job in (queue := self._queues.get(job.tenant, deque())):
            queue.remove(job)
            if not queue:
                del self._queues[job.tenant]
            self._queued_rows -= job.spec.num_samples
            self._release(job)

    def wake_all(self) -> None:
        """The service ends: polls are answered with what is known now."""
        for sample in self._samples.values():
            wake(sample.waiters)
        for done in self._completions.values():
            wake(done.waiters)

    async def drain(self, seconds: float) -> None:
        """Let what the engine has come to its end, for so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)


def _told(problem: Exception) -> tuple[str, str]:
    if isinstance(problem, EngineFault):
        return str(problem), problem.category
    return "The service failed to sample; its log says why.", "server"


async def _wait(waiters: set[asyncio.Future[None]], seconds: float) -> None:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.add(waiter)
    try:
        await asyncio.wait([waiter], timeout=seconds)
    finally:
        waiters.discard(waiter)
