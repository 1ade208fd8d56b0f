"""Repeats what needs the store until it succeeds, however long a disk is full, a database or a bucket away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from tinkex.clock import Clock
from tinkex.server.training.run_queue import PendingOperation
from tinkex.store.errors import BucketAway, DiskFull, LeaseLost, Unavailable

logger = logging.getLogger("tinkex.server")
T = TypeVar("T")

CAUSE = "store"
"""The cause for which training is paused meanwhile."""
FIRST_S, MOST_S = 0.5, 15.0


class Pausable(Protocol):
    def pause(self, cause: str, reason: str) -> None: ...
    def unpause(self, cause: str) -> None: ...


class UntilStored:
    """Without disk or database nothing can be stored, so all training of `worker` is paused meanwhile. Only large
    operations need a bucket: the others go on."""

    def __init__(self, clock: Clock, worker: Pausable) -> None:
        self._clock, self._worker = clock, worker

    async def __call__(self, work: Callable[[], Awaitable[T]], pending: PendingOperation) -> T:
        """Do it, with longer and longer waits; polls of the operation get the reason. HomeLost ends it."""
        wait_s = FIRST_S
        while True:
            try:
                return await work()
            except BucketAway as error:
                logger.error("%s waits for the bucket; trying again in %.1f s", pending.row.request_id, wait_s)
                pending.waits_for = str(error)
                await self._clock.sleep(wait_s)
                pending.waits_for = ""
            except (DiskFull, Unavailable, OSError) as error:
                logger.error("the store cannot be used; trying again in %.1f s: %s", wait_s, error)
                self._worker.pause(CAUSE, f"results cannot be stored: {error}")
                await self._clock.sleep(wait_s)
                self._worker.unpause(CAUSE)
            except LeaseLost:
                # The operation is the other server's now, and waits in the journal for it. This one is stopping, which
                # cancels this task: nothing is reported, because nothing is known.
                await asyncio.get_running_loop().create_future()
            wait_s = min(wait_s * 2, MOST_S)
