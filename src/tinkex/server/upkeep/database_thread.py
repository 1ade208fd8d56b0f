"""The store on a thread of its own, so that a slow disk or database never holds up the loop. Calls run one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Db:
    """`await db(store.add_session, session)`: in order, each one a transaction."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-store")

    async def __call__(self, call: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        # Shielded: a client that hangs up must not leave a half-known outcome behind.
        return await asyncio.shield(loop.run_in_executor(self._thread, call, *args))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
