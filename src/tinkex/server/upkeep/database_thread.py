"""Runs the store on its own thread, so that a slow disk or database never blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Db:
    """`await db(store.add_session, session)` runs one call; calls run one at a time, in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-store")

    async def __call__(self, call: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        # Shielded: a call goes on if its client hangs up, so that its result is never unknown.
        return await asyncio.shield(loop.run_in_executor(self._thread, call, *args))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
