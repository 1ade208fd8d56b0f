"""Lists by sampler which of its requests have finished, in order, for clients that poll for many results at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Literal

from tinkex.clock import Clock
from tinkex.server.training.waiters import wait_in, wake

MOST_SAMPLERS = 1000
"""Samplers that are remembered: those that finished a request last."""
MOST_COMPLETIONS = 20_000

FinishedState = Literal["finished", "failed"]


@dataclass(slots=True, eq=False)
class _Finished:
    """The finished requests of one sampler."""

    first: int
    """The cursor of the first entry that is remembered."""
    ids: deque[tuple[str, FinishedState]] = field(default_factory=deque)
    waiters: set[asyncio.Future[None]] = field(default_factory=set)


class Completions:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samplers: OrderedDict[str, _Finished] = OrderedDict()

    def __len__(self) -> int:
        return len(self._samplers)

    def add(self, sampler_id: str, request_id: str, state: FinishedState) -> None:
        finished = self._of(sampler_id)
        finished.ids.append((request_id, state))
        while len(finished.ids) > MOST_COMPLETIONS:
            finished.ids.popleft()
            finished.first += 1
        wake(finished.waiters)

    def forget(self, sampler_id: str, kept: Container[str]) -> None:
        """Forget the oldest requests of a sampler as far as they are not among those that are kept: their results are
        gone, and a server that draws five million samples a day would list them all."""
        if (finished := self._samplers.get(sampler_id)) is None:
            return
        while finished.ids and finished.ids[0][0] not in kept:
            finished.ids.popleft()
            finished.first += 1

    async def since(self, sampler_id: str, cursor: int, seconds: float) -> tuple[list[tuple[str, FinishedState]], int]:
        """Return the requests that finished since the cursor, and the next cursor. Waits if there are none yet."""
        done = self._of(sampler_id)
        if cursor > done.first + len(done.ids) or cursor < 0:
            cursor = done.first  # a cursor from before a restart: begin again, the client knows what it has
        if cursor >= done.first + len(done.ids):
            await wait_in(done.waiters, seconds)
        start = max(cursor - done.first, 0)
        return list(done.ids)[start:], done.first + len(done.ids)

    def wake_all(self) -> None:
        for done in self._samplers.values():
            wake(done.waiters)

    def _of(self, sampler_id: str) -> _Finished:
        if sampler_id not in self._samplers:
            # Cursors begin at the time of day: one from before a restart, or before this was forgotten, is below all.
            self._samplers[sampler_id] = _Finished(int(self._clock.wall() * 1e6))
        self._samplers.move_to_end(sampler_id)
        while len(self._samplers) > MOST_SAMPLERS:
            oldest = next(iter(self._samplers))
            if self._samplers[oldest].waiters:
                break
            del self._samplers[oldest]
        return self._samplers[sampler_id]
