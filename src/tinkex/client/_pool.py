"""The connections of one kind of traffic to one origin: opened when needed, used again, never more than the limit,
closed when idle. First come, first served."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections import deque

from tinkex.client._dial import Origin, dial
from tinkex.client._exchange import Connection, Exchange, Lost, Request, Silent

log = logging.getLogger("tinkex.http")
CONNECT_TIMEOUT_S = 10.0
IDLE_S = 60.0
SPARE_FILES = 8


class ConnectTimeout(OSError):
    """No connection within CONNECT_TIMEOUT_S."""


class ConnectionPool:
    """Loop thread."""

    def __init__(self, origin: Origin, limit: int, context: ssl.SSLContext | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = origin
        self._limit = limit
        self._context = context
        self._connections: list[Connection] = []
        self._idle: deque[Connection] = deque()
        self._opening = 0
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._reaper: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        return len(self._connections) + self._opening

    async def exchange(self, request: Request, timeout_s: float, is_streamed: bool = False) -> Exchange:
        """Send, and wait for the whole answer (or its beginning, if streamed). Raises Lost, Silent or OSError."""
        may_repeat = True
        while True:
            connection = await self._acquire()
            is_fresh, connection.was_used = not connection.was_used, True
            exchange = self._new_exchange(connection, is_streamed)
            try:
                connection.start(request, exchange)
                await self._wait(connection, exchange, timeout_s)
                return exchange
            except Lost as problem:
                # A connection that the service closed while it was idle, found out only now: nothing of an answer
                # came. Once more, at once, on another; the idempotency key and the seq_id make that harmless.
                if exchange.has_begun or not may_repeat or (is_fresh and not problem.is_untouched):
                    raise
                may_repeat = False
            except BaseException:
                self._give_up(connection, exchange)
                raise

    def _new_exchange(self, connection: Connection, is_streamed: bool) -> Exchange:
        exchange = Exchange(self._loop, is_streamed)
        exchange.release = lambda: self._release(connection)
        if is_streamed:
            exchange.abandon = lambda: self._give_up(connection, exchange)
        return exchange

    async def _wait(self, connection: Connection, exchange: Exchange, timeout_s: float) -> None:
        timer = self._loop.call_later(timeout_s, self._check_silence, connection, exchange, timeout_s, 1 << 62)
        try:
            await (exchange.ended if exchange.begun is None else exchange.begun)
        except asyncio.CancelledError:
            self._give_up(connection, exchange)
            raise
        finally:
            timer.cancel()

    def _check_silence(self, connection: Connection, exchange: Exchange, timeout_s: float, unsent_before: int) -> None:
        """Time is up if nothing has moved in either direction; a slow line that moves may take longer."""
        if exchange.ended.done():
            return
        unsent = connection.unsent_bytes()
        silent_s = self._loop.time() - connection.last_activity
        if 0 < unsent < unsent_before or silent_s < timeout_s * 0.99:
            wait_s = timeout_s if unsent else max(timeout_s - silent_s, 0.01)
            self._loop.call_later(wait_s, self._check_silence, connection, exchange, timeout_s, unsent)
            return
        connection.abandon(exchange)
        exchange.fail(
            Silent(f"nothing came for {timeout_s:.0f} s" if timeout_s >= 1 else f"nothing came for {timeout_s} s")
        )

    def _give_up(self, connection: Connection, exchange: Exchange) -> None:
        connection.abandon(exchange)
        exchange.fail(Lost("given up by the caller"))

    # -- connections ------------------------------------------------------------------------------------------------

    async def _acquire(self) -> Connection:
        while True:
            connection = self._free()
            if connection is not None:
                connection.in_use += 1
                return connection
            if self.size < self._limit:
                try:
                    return await self._open()
                except OSError as problem:
                    if problem.errno not in (errno.EMFILE, errno.ENFILE) or not self._connections:
                        raise
                    # Too many open files: make do with fewer, instead of failing what could wait.
                    self._limit = max(len(self._connections) - SPARE_FILES, 1)
                    log.warning(
                        "Too many open files: going on with %d connections to %s.", self._limit, self._origin.host
                    )
                    continue
            waiter: asyncio.Future[Connection | None] = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                handed = await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and (given := waiter.result()) is not None:
                    self._release(given)  # handed over and cancelled in the same tick
                raise
            if handed is not None:
                if not handed.is_closed:
                    return handed
                self._release(handed)

    def _free(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()  # the warmest; the coldest are closed by the reaper
            if not connection.is_closed and connection.in_use < connection.capacity:
                if connection.in_use + 1 < connection.capacity:
                    self._idle.append(connection)
                return connection
            if connection.is_closed:
                self._drop(connection)
        return None

    async def _open(self) -> Connection:
        self._opening += 1
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await dial(self._origin, self._context)
        except TimeoutError:
            raise ConnectTimeout(f"no connection within {CONNECT_TIMEOUT_S:.0f} s") from None
        finally:
            self._opening -= 1
            # Failed: somebody who waited for a place may try.
            self._wake_one(None)
        connection.in_use = 1
        self._connections.append(connection)
        if connection.capacity > 1:
            self._idle.append(connection)
            for _ in range(min(connection.capacity - 1, len(self._waiters))):
                self._wake_one(None)
        return connection

    def _release(self, connection: Connection) -> None:
        connection.in_use -= 1
        if connection.is_closed or connection.capacity == 0 or len(self._connections) > self._limit:
            if connection.in_use == 0:
                self._drop(connection)
            self._wake_one(None)
            return
        if connection.capacity == 1:
            while self._waiters:
                waiter = self._waiters.popleft()
                if not waiter.done():
                    connection.in_use += 1
                    waiter.set_result(connection)
                    return
        connection.idle_since = self._loop.time()
        if connection not in self._idle if connection.capacity > 1 else True:
            self._idle.append(connection)
        self._wake_one(None)
        if self._reaper is None:
            self._reaper = self._loop.call_later(IDLE_S, self._reap)

    def _wake_one(self, connection: Connection | None) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if not connection.is_closed:
            connection.close()

    def _reap(self) -> None:
        """Close what has been idle for long, so that a burst does not hold its connections for ever."""
        self._reaper = None
        now = self._loop.time()
        kept: deque[Connection] = deque()
        for connection in self._idle:
            if connection.in_use == 0 and (connection.is_closed or now - connection.idle_since >= IDLE_S):
                self._drop(connection)
            else:
                kept.append(connection)
        self._idle = kept
        if kept:
            self._reaper = self._loop.call_later(IDLE_S / 2, self._reap)

    def close(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        for connection in self._connections:
            connection.close()
