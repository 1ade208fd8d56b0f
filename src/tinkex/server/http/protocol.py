"""The HTTP protocol of a connection, with limits that uvicorn lacks: on their number, and on time and size of a head.

A server may close a connection at any time while no request is under way. So when an address has as many connections as
it may, the one that has been idle for longest makes room for a new one: connections that send nothing lock nobody out.
"""

from __future__ import annotations

import asyncio
import ipaddress
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinkex.server.http.errors import RequestRejected, error_response
from tinkex.server.limits.ledger import Ledger

MAX_HEAD_BYTES = 64 << 10
"""Limit for the request line and the headers. The first read, of at most some 256 KB, is not counted."""
WRITE_STALL_S = 60.0
"""How long a client may leave 64 KB of a response unread before its connection is closed."""
CLOSE_S = 10.0
"""How long the last bytes may take to leave once a connection is closed."""


class Connections:
    """The connections of one service: how many each address has, and which of them are idle."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._idle: dict[str, dict[BoundedProtocol, None]] = {}
        """Address → its connections without a request under way, those that have waited for longest first."""

    def add(self, connection: BoundedProtocol) -> None:
        """Count a connection. If there are too many, closes idle ones of the same address, or else raises a 503."""
        idle = self._idle.get(connection.address, {})
        while idle and not self.ledger.has_room("connections", connection.address, 1):
            oldest = next(iter(idle))
            self.remove(oldest)
            oldest.transport.abort()
        self.ledger.take("connections", connection.address, 1, "connections")
        connection.is_counted = True
        self.set_idle(connection)

    def remove(self, connection: BoundedProtocol) -> None:
        """Stop counting a connection. Does nothing if it was rejected or removed before."""
        if connection.is_counted:
            connection.is_counted = False
            self.set_busy(connection)
            self.ledger.give_back("connections", connection.address, 1)

    def set_idle(self, connection: BoundedProtocol) -> None:
        self._idle.setdefault(connection.address, {})[connection] = None

    def set_busy(self, connection: BoundedProtocol) -> None:
        idle = self._idle.get(connection.address)
        if idle is not None and idle.pop(connection, 0) is None and not idle:
            del self._idle[connection.address]


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with deadlines. `protocol_class` makes the class that a service uses."""

    all_connections: Connections
    address = ""
    is_counted = False
    _is_in_head = False
    _head_bytes = 0
    _head_deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.address = network_of(transport.get_extra_info("peername"))
        try:
            self.all_connections.add(self)
        except RequestRejected as error:
            transport.write(response_bytes(error))
            self._close()
            return
        super().connection_made(transport)
        self._start_head_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_deadline()
        self._stop_write_deadline()
        self.all_connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The headers are larger than {MAX_HEAD_BYTES} bytes.")
        # uvicorn has just stopped its timer for idle connections, whatever the data were.
        if self._head_deadline is None and (self._is_in_head or not self._has_request()):
            self._start_head_deadline()

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_deadline()
        self.all_connections.set_busy(self)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_counted and not self._has_request():
            self.all_connections.set_idle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(WRITE_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_deadline()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_deadline(self) -> None:
        seconds = self.all_connections.ledger.value("head_timeout_s")
        self._head_deadline = self.loop.call_later(seconds, self._on_head_deadline)

    def _stop_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _stop_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _on_head_deadline(self) -> None:
        self._head_deadline = None
        if self.transport.is_closing():
            return
        if self._has_request():  # half of a head behind a request that is still being processed: that one may end
            self.cycle.keep_alive = False
            return
        if self._is_in_head:  # otherwise the connection is only quiet: nothing is rejected
            error = self.all_connections.ledger.rejection("head_timeout_s", "The head of a request took too long")
            self.transport.write(response_bytes(error))
        self._close()

    def _close(self) -> None:
        """Close the connection, also if the client does not read what was sent last."""
        if not self.transport.is_closing():
            self.transport.close()
            if self.transport.get_write_buffer_size():
                self.loop.call_later(CLOSE_S, self.transport.abort)


def protocol_class(ledger: Ledger) -> type[BoundedProtocol]:
    """Return the protocol for the connections of one service, whose limits its ledger knows."""
    return type("ServiceProtocol", (BoundedProtocol,), {"all_connections": Connections(ledger)})


def network_of(peer: tuple[str, int] | None) -> str:
    """Return the address that a connection counts for. For IPv6 it is the network of 2^64 that one customer gets."""
    address = peer[0] if peer else ""
    if ":" not in address:
        return address
    whole = ipaddress.IPv6Address(address.partition("%")[0])
    return str(whole.ipv4_mapped or ipaddress.IPv6Network((int(whole) >> 64 << 64, 64)))


def response_bytes(error: RequestRejected) -> bytes:
    """Return the whole response for an error before, or instead of, a request that the application could see."""
    response = error_response(error)
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    return b"\r\n".join([*lines, *(name + b": " + value for name, value in headers), b"", bytes(response.body)])
