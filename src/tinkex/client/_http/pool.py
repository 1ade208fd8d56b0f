"""A pool of connections of one kind of traffic to one origin: opened when needed, reused, never more than the limit,
closed when idle. First come, first served."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import ssl
from collections import deque

from tinkex.client._http.dial import Origin, dial
from tinkex.client._http.exchange import Connection, ConnectionLost, Exchange, HTTPRequest, ReadTimeout
from tinkex.wire.body import MAX_BYTES

log = logging.getLogger("tinkex.http")
CONNECT_TIMEOUT_S = 10.0
IDLE_S = 60.0
NO_FILES = (errno.EMFILE, errno.ENFILE)
SPARE_FILES = 8
ASSUMED_STREAMS = 100
"""Behind TLS there may be HTTP/2: wait for the first connection instead of opening one for each request."""


class ConnectTimeout(OSError):
    """No connection within CONNECT_TIMEOUT_S."""


class ConnectionPool:
    """Sends requests over its connections. Loop thread."""

    def __init__(
        self, origin: Origin, limit: int, context: ssl.SSLContext | None, max_response_bytes: int = MAX_BYTES
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = origin
        self._limit = limit
        self._context = context
        self._max_response_bytes = max_response_bytes
        self._connections: list[Connection] = []
        self._idle: deque[Connection] = deque()
        self._opening = 0
        self._streams = ASSUMED_STREAMS if origin.scheme == "https" else 1
        """How many exchanges a new connection will carry: known once a first one is open."""
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._reaper: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        return len(self._connections) + self._opening

    async def exchange(self, request: HTTPRequest, timeout_s: float, is_streamed: bool = False) -> Exchange:
        """Send, and wait for the whole response (or its headers, if streamed).

        Raises ConnectionLost, ReadTimeout, ResponseTooLarge or OSError.
        """
        is_repeat = False
        while True:
            connection = await self._acquire()
            is_fresh, connection.was_used = not connection.was_used, True
            exchange = Exchange(self._loop, is_streamed, self._max_response_bytes)
            exchange.release = functools.partial(self._release, connection)
            if is_streamed:
                exchange.abandon = functools.partial(self._abandon, connection, exchange)
            try:
                await self._send(connection, exchange, request, timeout_s)
                return exchange
            except ConnectionLost as error:
                if is_repeat or exchange.has_begun or (is_fresh and not error.is_untouched):
                    raise
            # No retry, but a rule of the transport: the service had closed the connection while it was idle, or
            # rejected the stream unread, and nothing of a response came. Once more, at once, on another connection; the
            # idempotency key and the seq_id make that harmless. A second loss is the caller's to handle.
            is_repeat = True

    async def _send(self, connection: Connection, exchange: Exchange, request: HTTPRequest, timeout_s: float) -> None:
        try:
            connection.start(request, exchange)
            unsent = connection.unsent_bytes(exchange)
            exchange.timer = self._loop.call_later(
                timeout_s, self._check_silence, connection, exchange, timeout_s, unsent
            )
            await (exchange.ended if exchange.begun is None else exchange.begun)
        except ConnectionLost:
            raise
        except BaseException:
            self._abandon(connection, exchange)
            raise
        finally:
            if exchange.timer is not None:
                exchange.timer.cancel()

    def _check_silence(self, connection: Connection, exchange: Exchange, timeout_s: float, unsent_before: int) -> None:
        """Fail the exchange if nothing has moved in either direction; a slow line that moves may take longer."""
        if exchange.ended.done():
            return
        unsent = connection.unsent_bytes(exchange)
        if unsent < unsent_before:
            exchange.last_activity = self._loop.time()  # or a little earlier; the response has its full time from here
        silent_s = self._loop.time() - exchange.last_activity
        if silent_s < timeout_s * 0.99:
            wait_s = max(timeout_s - silent_s, 0.01)
            exchange.timer = self._loop.call_later(wait_s, self._check_silence, connection, exchange, timeout_s, unsent)
            return
        connection.abandon(exchange)
        if self._loop.time() - connection.last_activity >= timeout_s * 0.99:
            # Not this exchange alone: the line is dead. Connections that were idle meanwhile are no better, and later
            # requests must not find that out one by one.
            connection.close()
            self._drop_idle()
        exchange.end(
            ReadTimeout(f"nothing came for {timeout_s:.0f} s" if timeout_s >= 1 else f"nothing came for {timeout_s} s")
        )

    def _abandon(self, connection: Connection, exchange: Exchange) -> None:
        connection.abandon(exchange)
        exchange.end(ConnectionLost("abandoned by the caller"))

    # -- connections ------------------------------------------------------------------------------------------------

    async def _acquire(self) -> Connection:
        while True:
            connection = self._free()
            if connection is not None:
                connection.in_use += 1
                return connection
            # Exchanges that the connections being opened will carry, beyond those of the callers that open them.
            coming = self._opening * (self._streams - 1)
            if self.size < self._limit and len(self._waiters) >= coming:
                try:
                    return await self._open()
                except OSError as error:
                    if error.errno not in NO_FILES or not self._connections:
                        raise
                    # Too many open files: go on with fewer connections instead of failing requests that could wait.
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
                # Woken and cancelled in the same tick: pass on to the next waiter what was meant for this one.
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    connection = waiter.result()
                    if connection is None:
                        self._wake_one()
                    else:
                        self._release(connection)
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
        except OSError as error:  # TimeoutError is one
            if isinstance(error, TimeoutError):
                error = ConnectTimeout(f"no connection within {CONNECT_TIMEOUT_S:.0f} s")
            if error.errno not in NO_FILES:
                self._fail_waiters(error)
            self._wake_one()
            raise error from None
        except BaseException:
            self._wake_one()  # abandoned by its caller, not failed by the service: the next may try
            raise
        finally:
            self._opening -= 1
        connection.in_use = 1
        self._connections.append(connection)
        self._streams = connection.capacity
        if connection.capacity > 1:
            self._idle.append(connection)
        # Wake those that fit onto it; or, if it carries one exchange only, those that may now open their own.
        for _ in range(connection.capacity - 1 or self._limit - self.size):
            self._wake_one()
        return connection

    def _fail_waiters(self, error: OSError) -> None:
        """A connection could not be opened: fail those that waited for it at once, not one by one."""
        for _ in range(self._streams - 1):
            if (waiter := self._next_waiter()) is not None:
                waiter.set_exception(error)

    def _release(self, connection: Connection) -> None:
        connection.in_use -= 1
        if connection.is_closed or connection.capacity == 0 or len(self._connections) > self._limit:
            if connection.in_use == 0:
                self._drop(connection)
            self._wake_one()
            return
        if connection.capacity == 1 and (waiter := self._next_waiter()) is not None:
            connection.in_use += 1
            waiter.set_result(connection)
            return
        connection.idle_since = self._loop.time()
        # Over HTTP/2 a connection with room for more is in `_idle` already, even while it is in use.
        if connection.capacity == 1 or connection not in self._idle:
            self._idle.append(connection)
        self._wake_one()
        if self._reaper is None:
            self._reaper = self._loop.call_later(IDLE_S, self._reap)

    def _wake_one(self) -> None:
        if (waiter := self._next_waiter()) is not None:
            waiter.set_result(None)

    def _next_waiter(self) -> asyncio.Future[Connection | None] | None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                return waiter
        return None

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if not connection.is_closed:
            connection.close()

    def _drop_idle(self) -> None:
        idle, self._idle = self._idle, deque(each for each in self._idle if each.in_use)
        for connection in idle:
            if not connection.in_use:
                self._drop(connection)

    def _reap(self) -> None:
        """Close connections that have been idle for long, so that a burst does not keep its connections for ever."""
        self._reaper = None
        now = self._loop.time()
        still_idle: deque[Connection] = deque()
        for connection in self._idle:
            if connection.in_use == 0 and (connection.is_closed or now - connection.idle_since >= IDLE_S):
                self._drop(connection)
            else:
                still_idle.append(connection)
        self._idle = still_idle
        if still_idle:
            self._reaper = self._loop.call_later(IDLE_S / 2, self._reap)
