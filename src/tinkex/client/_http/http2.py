"""One HTTP/2 connection with many exchanges at once. h2 does frames and state; this module does the I/O."""

from __future__ import annotations

import asyncio
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
from h2.connection import ConnectionInputs, ConnectionState

from tinkex.client._http.exchange import Connection, ConnectionLost, Exchange, HTTPRequest, ResponseTooLarge

STREAMS = 100
"""Exchanges per connection, if the service allows as many: beyond that another connection is opened."""
STREAM_WINDOW = 1 << 22
CONNECTION_WINDOW = 1 << 24
"""How many bytes may be on their way to us: the default of 64 KiB costs a round trip for each piece of that size."""
_CONFIG = h2.config.H2Configuration(
    client_side=True, header_encoding="latin-1", validate_outbound_headers=False, normalize_outbound_headers=False
)
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "host", "transfer-encoding", "upgrade", "proxy-connection"})


class _Patient(h2.connection.H2ConnectionStateMachine):
    """Reads on after a GOAWAY, where h2 would reject every further frame: gateways send it while responses are on
    their way (each time a connection has served its thousand requests), and then finish those."""

    def __init__(self) -> None:
        super().__init__()
        open_, goaway = ConnectionState.CLIENT_OPEN, ConnectionInputs.RECV_GOAWAY
        self._transitions = {**self._transitions, (open_, goaway): (None, open_)}


class Http2(Connection):
    """An asyncio protocol for many exchanges."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._h2 = h2.connection.H2Connection(_CONFIG)
        self._h2.state_machine = _Patient()
        self._streams: dict[int, Exchange] = {}
        self._numbers: dict[Exchange, int] = {}
        self._unsent: dict[int, memoryview] = {}
        self._unread: dict[int, int] = {}
        self._is_writable = True
        self.capacity = STREAMS
        self.settled: asyncio.Future[None] = loop.create_future()

    # -- called by the pool -----------------------------------------------------------------------------------------

    def start(self, request: HTTPRequest, exchange: Exchange) -> None:
        request.check()
        headers = [
            (":method", request.method),
            (":scheme", request.scheme),
            (":authority", request.authority),
            (":path", request.target),
        ]
        headers += [(name.lower(), value) for name, value in request.headers.items() if name not in _HOP_BY_HOP]
        if request.content:
            headers.append(("content-length", str(len(request.content))))
        try:
            number = self._h2.get_next_available_stream_id()
            self._h2.send_headers(number, headers, end_stream=not request.content)
        except h2.exceptions.ProtocolError as error:
            self.capacity = 0  # no stream can be opened here any more
            exchange.end(ConnectionLost(f"the connection takes no more requests ({error})", is_untouched=True))
            return
        self._streams[number] = exchange
        self._numbers[exchange] = number
        if request.content:
            self._unsent[number] = memoryview(request.content)
        self._pump()

    def abandon(self, exchange: Exchange) -> None:
        number = self._numbers.get(exchange)
        if number is None:
            return
        self._forget(number)
        if not self.is_closed:
            self._reset(number)
            self._flush()

    def unsent_bytes(self, exchange: Exchange) -> int:
        return super().unsent_bytes(exchange) + len(self._unsent.get(self._numbers.get(exchange, 0), b""))

    # -- called by asyncio -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._h2.initiate_connection()
        codes = h2.settings.SettingCodes
        self._h2.update_settings({codes.INITIAL_WINDOW_SIZE: STREAM_WINDOW, codes.ENABLE_PUSH: 0})
        self._h2.increment_flow_control_window(CONNECTION_WINDOW)
        self._flush()

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._pump()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        reason = str(error) if error else "closed by the service"
        if not self.settled.done():
            self.settled.set_exception(OSError(f"connection lost ({reason})"))
            self.settled.exception()  # marked as seen: no waiter may be left
        for number in list(self._streams):
            self._end(number, ConnectionLost(f"connection lost ({reason})"))

    def data_received(self, data: bytes) -> None:
        self.last_activity = self._loop.time()
        try:
            for event in self._h2.receive_data(data):
                self._on(event)
        except h2.exceptions.ProtocolError as error:
            for number in list(self._streams):
                self._end(number, ConnectionLost(f"the response is not HTTP/2: {error}"))
            self._flush()
            self.close()
            return
        self._pump()

    def _on(self, event: Any) -> None:
        match event:
            case h2.events.ResponseReceived(stream_id=number) if number in self._streams:
                self._begin(number, event.headers)
            case h2.events.DataReceived(stream_id=number):
                self._take(number, event.data, event.flow_controlled_length)
            case h2.events.StreamEnded(stream_id=number) if number in self._streams:
                if number in self._unsent:  # the service has responded before it had all of the body
                    self._reset(number)
                self._end(number)
            case h2.events.StreamReset(stream_id=number) if number in self._streams:
                is_untouched = event.error_code == h2.errors.ErrorCodes.REFUSED_STREAM
                self._end(
                    number,
                    ConnectionLost(f"stream reset by the service ({event.error_code})", is_untouched=is_untouched),
                )
            case h2.events.ConnectionTerminated():
                # The service is leaving: it will not do what it has not begun; the rest may still get its response.
                self.capacity = 0
                for number in [open_ for open_ in self._streams if open_ > (event.last_stream_id or 0)]:
                    self._end(number, ConnectionLost("the service closes this connection (GOAWAY)", is_untouched=True))
                if not self._streams:
                    self.close()
            case h2.events.RemoteSettingsChanged():
                if not self.settled.done():
                    self.settled.set_result(None)
                if self.capacity:
                    self.capacity = max(1, min(STREAMS, self._h2.remote_settings.max_concurrent_streams))

    def _begin(self, number: int, pairs: Any) -> None:
        headers: dict[str, str] = {}
        for name, value in pairs:
            headers[name] = value if name not in headers else f"{headers[name]}, {value}"
        exchange, status = self._streams[number], headers.pop(":status", "")
        exchange.last_activity = self.last_activity
        if not (len(status) == 3 and status.isascii() and status.isdigit()):
            self._refuse(number, ConnectionLost(f"the response has the status {status[:20]!r}"))
            return
        try:
            exchange.begin(int(status), headers, lambda: self._acknowledge(number))
        except ResponseTooLarge as error:
            self._refuse(number, error)

    def _take(self, number: int, data: bytes, flow_bytes: int) -> None:
        exchange = self._streams.get(number)
        self._unread[number] = self._unread.get(number, 0) + flow_bytes
        if exchange is not None:
            exchange.last_activity = self.last_activity
        try:
            if exchange is None or exchange.feed(data):
                self._acknowledge(number)  # room for more; a full buffer gives it later, through `resume`
        except ResponseTooLarge as error:
            self._refuse(number, error)

    def _acknowledge(self, number: int) -> None:
        flow_bytes = self._unread.pop(number, 0)
        if flow_bytes and not self.is_closed:
            self._h2.acknowledge_received_data(flow_bytes, number)
            self._flush()

    def _reset(self, number: int) -> None:
        try:
            self._h2.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
        except h2.exceptions.ProtocolError:
            pass  # the service was quicker

    def _end(self, number: int, error: ConnectionLost | None = None) -> None:
        self._forget(number).end(error)

    def _refuse(self, number: int, error: ConnectionLost | ResponseTooLarge) -> None:
        """Take no more of a response, and leave the other exchanges alone."""
        exchange = self._forget(number)
        self._reset(number)
        exchange.end(error)

    def _forget(self, number: int) -> Exchange:
        exchange = self._streams.pop(number)
        del self._numbers[exchange]
        self._unsent.pop(number, None)
        self._acknowledge(number)
        return exchange

    def _pump(self) -> None:
        """Send as much of the waiting bodies as flow control and the socket take."""
        for number in list(self._unsent) if self._is_writable and not self.is_closed else ():
            body = self._unsent[number]
            # A service may shrink its windows while a body is on its way: they are then below zero for a while.
            size = max(min(len(body), self._h2.local_flow_control_window(number)), 0)
            frame = self._h2.max_outbound_frame_size
            for start in range(0, size, frame):
                self._h2.send_data(number, body[start : min(start + frame, size)].tobytes())
            if size == len(body):
                del self._unsent[number]
                self._h2.end_stream(number)
            else:
                self._unsent[number] = body[size:]
        self._flush()

    def _flush(self) -> None:
        if not self.is_closed and (data := self._h2.data_to_send()):
            self._transport.write(data)
