"""Shares the engine's memory for adapters: counts their bytes, and decides which run leaves so that another can enter.

A run that has nothing to do leaves first, the least recently used one before the others. If every run has work, a run
leaves between two of its operations, once it has had its time; operations whose adapter has no room yet wait. Tenants
with few bytes in memory enter first, and their runs do not leave for a tenant that has more. It does no I/O: `Worker`
evicts.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from tinkex.clock import Clock
from tinkex.engine.contract import Engine
from tinkex.server.limits.ledger import Ledger

logger = logging.getLogger("tinkex.server")

LEAST_STAY_S = 1.0
"""Seconds that a run with work stays before it leaves for another one."""
IDLE_AFTER_S = 1.0
"""A loop that awaits every call is idle for a moment between two of them. Before this time its run leaves only for its
own tenant, or for one that has less in memory."""
STAY_PER_LOAD = 4.0
"""It stays at least so many times as long as it took to load it, so that loading never is most of the work."""
LOOK_AGAIN_S = 0.5
MOST_WAITING = 4
"""Operations of one tenant that wait for room. More would only be tasks: one enters at a time, and the others are as
well off in their queues."""


class Activity(enum.IntEnum):
    """What a run does: nothing, something soon, something now. A run can leave unless it is busy."""

    IDLE = 0
    WAITING = 1
    BUSY = 2


@dataclass(slots=True)
class ResidentAdapter:
    """The room of an adapter in one generation of the engine."""

    tenant: str
    nbytes: int
    generation: int
    used_at: float
    stays_until: float


@dataclass(slots=True, eq=False)
class Entering:
    """An operation that waits for room for its adapter."""

    tenant: str
    nbytes: int


class AdapterMemory:
    """Counts the adapters in the engine and makes room for others.

    `activity_of` says what a run does; `evict` drops its adapter and returns whether it did; `on_room` is called
    when an operation no longer waits for room.
    """

    def __init__(
        self,
        budget_bytes: int,
        clock: Clock,
        engine: Engine,
        activity_of: Callable[[str], Activity],
        evict: Callable[[str], Awaitable[bool]],
        on_room: Callable[[], None],
    ) -> None:
        self.budget_bytes = budget_bytes
        self._clock, self._engine = clock, engine
        self._activity_of, self._evict, self._on_room = activity_of, evict, on_room
        self._adapters: dict[str, ResidentAdapter] = {}
        """By run, the least recently used first."""
        self._totals: dict[str, int] = {}
        """Tenant → bytes of its adapters. Kept up to date: the loop asks for it once per run that has work."""
        self._line: list[Entering] = []
        self._waiting_of: dict[str, int] = {}
        """Tenant → its entries in the line."""
        self._changed = asyncio.Event()
        """Set once, at the next change; then there is a new one."""

    @property
    def used_bytes(self) -> int:
        return sum(self._totals.values())

    @property
    def waiting(self) -> int:
        """How many operations wait for room. They hold no memory and do nothing meanwhile."""
        return len(self._line)

    def check_size(self, ledger: Ledger, nbytes: int, noun: str) -> None:
        """Reject an adapter that is larger than the memory for all. `noun` says which, for the message."""
        if nbytes > (most := self.budget_bytes):
            reason = f"{noun} takes {-(-nbytes // 10**6)} MB of memory"
            raise ledger.rejection("adapter_memory_mb", reason, value=most // 10**6)

    async def reserve(self, run_id: str, tenant: str, nbytes: int, *, may_wait: bool = True) -> None:
        """Make room for an adapter, and wait until there is some. Other runs cannot use the room until `release`.

        Without `may_wait` it evicts what it can, and enters in any case.
        """
        # An adapter larger than the budget (it may have been larger at the last start) is alone in memory.
        entering = Entering(tenant, min(nbytes, self.budget_bytes))
        if may_wait:
            await self._wait_for_room(entering)
        else:
            while not self._has_room(entering) and await self._evict_for(entering):
                pass
        generation, now = self._engine.state.generation, self._clock.now()
        self._remove(run_id)
        self._adapters[run_id] = ResidentAdapter(tenant, nbytes, generation, now, now + LEAST_STAY_S)
        self._totals[tenant] = self._totals.get(tenant, 0) + nbytes

    def _remove(self, run_id: str) -> None:
        if (adapter := self._adapters.pop(run_id, None)) is None:
            return
        if left := self._totals.get(adapter.tenant, 0) - adapter.nbytes:
            self._totals[adapter.tenant] = left
        else:
            self._totals.pop(adapter.tenant, None)

    async def _wait_for_room(self, entering: Entering) -> None:
        self._line.append(entering)
        self._waiting_of[entering.tenant] = self._waiting_of.get(entering.tenant, 0) + 1
        try:
            while self.first() is not entering or not self._has_room(entering):
                changed = self._changed
                if self.first() is not entering or not await self._evict_for(entering):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), LOOK_AGAIN_S)
        finally:
            self._line.remove(entering)
            self._waiting_of[entering.tenant] -= 1
            if not self._waiting_of[entering.tenant]:
                del self._waiting_of[entering.tenant]
            self.notify()
            self._on_room()  # also if others wait: a run that had to leave for this one may go on

    def _has_room(self, entering: Entering) -> bool:
        if not entering.nbytes:
            return True
        generation = self._engine.state.generation
        for run_id in [run for run, adapter in self._adapters.items() if adapter.generation != generation]:
            self._remove(run_id)
        return self.used_bytes + entering.nbytes <= self.budget_bytes

    def first(self) -> Entering | None:
        """Return who enters next: an operation of the tenant with the fewest bytes, the first to come among equals."""
        return min(self._line, key=lambda entering: self._totals.get(entering.tenant, 0), default=None)

    async def _evict_for(self, entering: Entering) -> bool:
        for run_id in list(self._leaving(entering)):
            if await self._evict(run_id):
                return True
        return False

    def _leaving(self, entering: Entering) -> Iterator[str]:
        """Yield the runs that may leave for an operation, the first to leave first."""
        activities = {run_id: self._activity_of(run_id) for run_id in self._adapters}
        idle_since = self._clock.now() - IDLE_AFTER_S
        for run_id, activity in activities.items():
            is_long_idle = self._adapters[run_id].used_at < idle_since
            if activity is Activity.IDLE and (is_long_idle or self._may_leave_for(entering.tenant, run_id)):
                yield run_id
        for run_id, activity in activities.items():
            if activity is Activity.WAITING and self._may_take(entering, run_id):
                yield run_id

    def _may_take(self, entering: Entering, run_id: str) -> bool:
        """Whether a run with work leaves for an operation: its least stay is over, and it may leave for that tenant."""
        adapter = self._adapters.get(run_id)
        is_due = adapter is not None and adapter.stays_until <= self._clock.now()
        return is_due and self._may_leave_for(entering.tenant, run_id)

    def _may_leave_for(self, tenant: str, run_id: str) -> bool:
        """Whether a run is of this tenant, or of one that has more bytes in memory."""
        owner = self._adapters[run_id].tenant
        return owner == tenant or self._totals.get(owner, 0) > self._totals.get(tenant, 0)

    def must_wait(self, run_id: str, tenant: str, first: Entering | None) -> bool:
        """Whether a run starts no operation now: the `first` in the line waits for its room, or the line is long."""
        if first is None:
            return False
        if run_id not in self._adapters:
            return self._waiting_of.get(tenant, 0) >= MOST_WAITING
        return self._may_take(first, run_id)

    def loaded(self, run_id: str, seconds: float) -> None:
        """Note that an adapter is in the engine, and how long that took."""
        if (adapter := self._adapters.get(run_id)) is not None:
            adapter.stays_until = self._clock.now() + max(LEAST_STAY_S, STAY_PER_LOAD * seconds)

    def touch(self, run_id: str) -> None:
        """Note that a run is used: it leaves after all that were used before."""
        if (adapter := self._adapters.pop(run_id, None)) is not None:
            adapter.used_at = self._clock.now()
            self._adapters[run_id] = adapter

    def release(self, run_id: str) -> None:
        self._remove(run_id)
        self.notify()

    def notify(self) -> None:
        """Let operations that wait look again: a run has left, or has ended an operation."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def relieve(self, most: int, but_run: str | None) -> int:
        """Evict up to `most` runs that are not busy, because the engine ran out of memory. Return how many left.

        Idle runs leave first, and among them those of the tenant with the most bytes.
        """
        totals = dict(self._totals)
        others = [run_id for run_id in self._adapters if run_id != but_run]
        others.sort(key=lambda run_id: (self._activity_of(run_id), -totals.get(self._adapters[run_id].tenant, 0)))
        count = 0
        for run_id in others:
            if count < most and self._activity_of(run_id) is not Activity.BUSY:
                count += await self._evict(run_id)
        work = "while sampling" if but_run is None else f"under {but_run}"
        logger.warning("the engine is out of memory %s; %d other runs were evicted", work, count)
        return count

    def relief(self, run_id: str) -> Relief:
        """Begin to make room for an operation of a run."""
        return Relief(self, run_id)


class Relief:
    """Makes room for one operation that runs out of memory: more runs leave each time.

    It gives up after a round that found fewer runs to evict than it wanted (busy runs stay). Those that are in use come
    back meanwhile, so there would always be one more to evict, for an operation that is too large by itself.
    """

    def __init__(self, memory: AdapterMemory, run_id: str) -> None:
        self._memory, self._run_id = memory, run_id
        self._most = 1
        self._has_tried_all = False

    async def make_room(self) -> bool:
        """Evict others. False if nothing is left to try."""
        if self._has_tried_all:
            return False
        self._most *= 2
        count = await self._memory.relieve(self._most, self._run_id)
        self._has_tried_all = count < self._most
        return count > 0
