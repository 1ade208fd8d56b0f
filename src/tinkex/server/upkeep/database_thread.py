"""Runs the store on its own thread, so that a slow disk or database never blocks the event loop.

A call has a deadline, however long the database is silent: its request gets an error that says so, and the connection
that it waits on is broken, so that the thread is free for the next call. What the store keeps beside its rows, in files
or in a bucket, is read and written on threads of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar
from weakref import WeakValueDictionary

from tinkex.clock import REAL
from tinkex.store.errors import Unavailable

T = TypeVar("T")

CALL_S = 11.0
"""How long a call may take, its wait for earlier ones included. A locked SQLite file says so itself after 10 s, and
PostgreSQL ends a statement after 8 s."""
MOST_BESIDE = 16
"""Files and objects that are read or written at once. Not on asyncio's own threads (six on two cores): a bucket that
does not respond would keep them from all other work."""
MOST_OF_TENANT = 4
"""Of these threads, what the folders of one tenant take: large ones come slowly, and others need theirs meanwhile."""


class Db:
    """`await db(store.add_session, session)` runs one call; calls run one at a time, in order.

    `interrupt` breaks the call that is running (`Store.interrupt`).
    """

    def __init__(self, interrupt: Callable[[], None] = lambda: None, call_s: float = CALL_S) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-store")
        self._interrupt, self._call_s = interrupt, call_s
        self._began_s = 0.0
        self._beside = ThreadPoolExecutor(MOST_BESIDE, thread_name_prefix="tinkex-blobs")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._parts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By tenant: its part of the threads beside."""

    async def __call__(self, call: Callable[..., T], *args: object) -> T:
        """Run a call. Raises Unavailable if it has no result in time; it may still be stored then."""
        future: Future[T] = self._thread.submit(self._run, call, *args)
        deadline = asyncio.timeout(self._call_s)
        try:
            async with deadline:
                # Shielded: a call goes on if its client hangs up, so that its result is never unknown.
                return await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError:
            if not deadline.expired():
                raise
            self._on_overdue(future)
            raise Unavailable("The database does not respond. Check that it runs, then try again.") from None

    async def beside(self, call: Callable[..., T], *args: object) -> T:
        """Run a call that reads or writes files or a bucket, and no row. It ends by its own deadlines."""
        return await asyncio.wrap_future(self._beside.submit(call, *args))

    async def beside_for(self, tenant: str, call: Callable[..., T], *args: object) -> T:
        """Run a call beside once this tenant has fewer than `MOST_OF_TENANT` there."""
        part = self._parts.setdefault(tenant, asyncio.Semaphore(MOST_OF_TENANT))
        async with part:
            return await self.beside(call, *args)

    def turn(self, name: str) -> asyncio.Lock:
        """Return a lock for calls beside that would otherwise wait for each other on their few threads."""
        return self._turns.setdefault(name, asyncio.Lock())

    def _run(self, call: Callable[..., T], *args: object) -> T:
        self._began_s = REAL.now()
        try:
            return call(*args)
        finally:
            self._began_s = 0.0

    def _on_overdue(self, future: Future[T]) -> None:
        """Forget a call that did not begin, and break the one that keeps the thread, if it has had its time."""
        future.cancel()
        began_s = self._began_s
        if began_s and REAL.now() - began_s >= self._call_s / 2:
            self._interrupt()

    def close(self) -> None:
        """Wait for the calls that were made, but not for a database that is silent."""
        last = self._thread.submit(lambda: None)
        if not wait([last], self._call_s).done:
            self._interrupt()
        self._thread.shutdown(wait=True)
        self._beside.shutdown(wait=True, cancel_futures=True)
