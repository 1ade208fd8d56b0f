"""Says why the service cannot work now, within two seconds, whatever hangs: the database, the engine, the disk."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinkex.errors import TinkexError

if TYPE_CHECKING:
    from tinkex.server.service import Service

WITHIN_S = 2.0
FRESH_S = 1.0
"""How long a reply of database and disk counts: everybody may ask for it, without a key."""
SILENT_S = 10.0
"""An engine that sent nothing for so long is stopped or stuck. It sends a beat every second, whatever it computes."""
MIN_FREE_BYTES = 200_000_000
"""Below this the service starts no training (`janitor`)."""


class Readiness:
    """Asks database and disk one question at a time, and at most once a second."""

    def __init__(self) -> None:
        self._probe: asyncio.Task[str | None] | None = None
        self._asked_s = -math.inf
        self.is_announced: Callable[[], bool] = lambda: True
        """Whether the other servers of a cluster know that this one is ready."""

    async def reason(self, service: Service) -> str | None:
        """Return why the service cannot work, or None if it can."""
        state = service.engine.state
        if not state.is_ready:
            return state.reason or "The engine is starting."
        if state.silent_s > SILENT_S:
            return f"The engine has not responded for {state.silent_s:.0f} s: it is stopped or stuck."
        if not self.is_announced():
            return "The other servers do not know yet that the engine of this one is ready."
        return service.worker.pause_reason or await self._probe_reason(service)

    async def _probe_reason(self, service: Service) -> str | None:
        now = service.clock.now()
        if self._probe is None or (self._probe.done() and now - self._asked_s >= FRESH_S):
            self._probe, self._asked_s = asyncio.create_task(_probe(service)), now
        done, _ = await asyncio.wait([self._probe], timeout=max(self._asked_s + WITHIN_S - now, 0.0))
        return self._probe.result() if done else "The database or the disk does not respond."


async def _probe(service: Service) -> str | None:
    try:
        await service.db(service.store.ping)
        free = (await asyncio.to_thread(shutil.disk_usage, service.config.data_dir)).free
    except (TinkexError, OSError) as error:
        return str(error) if isinstance(error, TinkexError) else "The data folder cannot be read."
    if free < MIN_FREE_BYTES:
        return f"The service's disk has {free / 1e6:.0f} MB left. Delete checkpoints or run `tinkex gc`."
    return None
