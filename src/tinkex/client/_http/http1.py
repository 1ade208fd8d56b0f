"""One HTTP/1.1 connection, one exchange at a time. httptools (llhttp, the parser of Node) parses the responses."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools

from tinkex.client._http.exchange import (
    HEAD_BYTES,
    MAX_HEADERS,
    Connection,
    ConnectionLost,
    Exchange,
    HTTPRequest,
    ResponseTooLarge,
)


class Http1(Connection):
    """An asyncio protocol for one exchange at a time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, proxy_authorization: str | None = None, via_proxy: bool = False
    ) -> None:
        super().__init__(loop)
        self._via_proxy = via_proxy
        self._proxy_authorization = proxy_authorization
        self._parser: Any = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._headers: dict[str, str] = {}
        self._header_count = 0
        self._bodiless_bytes = 0
        """Bytes since the request, or since the last that were of a body: headers, interim responses, trailers."""
        self._status = 0
        self._is_paused = False

    # -- called by the pool -----------------------------------------------------------------------------------------

    def start(self, request: HTTPRequest, exchange: Exchange) -> None:
        request.check()
        head = self._head(request)
        self._exchange = exchange
        self._bodiless_bytes = 0
        self.last_activity = self._loop.time()
        if len(request.content) < 1 << 16:
            self._transport.write(head + request.content)
        else:
            self._transport.write(head)
            self._transport.write(request.content)

    def abandon(self, exchange: Exchange) -> None:
        # The response may still come: a connection that owes one cannot be used again.
        if exchange is self._exchange:
            self._exchange = None
            self.close()

    def _head(self, request: HTTPRequest) -> bytes:
        target = request.target
        if self._via_proxy:
            target = f"{request.scheme}://{request.authority}{target}"
        lines = [f"{request.method} {target} HTTP/1.1\r\nhost: {request.authority}\r\n"]
        for name, value in request.headers.items():
            lines.append(f"{name}: {value}\r\n")
        if self._proxy_authorization:
            lines.append(f"proxy-authorization: {self._proxy_authorization}\r\n")
        if request.content or request.method != "GET":
            lines.append(f"content-length: {len(request.content)}\r\n")
        lines.append("\r\n")
        return "".join(lines).encode("latin-1")

    # -- called by asyncio -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.last_activity = self._loop.time()
        if self._exchange is None:
            self.close()  # a response without a request
            return
        self._exchange.last_activity = self.last_activity
        self._bodiless_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionLost(f"the response is not HTTP: {error}"))
        if self._bodiless_bytes > HEAD_BYTES and self._exchange is not None:
            # The parser has no limit of its own: it would gather an endless header in memory.
            self._fail(ResponseTooLarge(f"its headers have more than {HEAD_BYTES:,} bytes"))

    def eof_received(self) -> None:
        exchange = self._exchange
        # A response without a length ends with its connection.
        if (
            exchange is not None
            and exchange.has_begun
            and not ({"content-length", "transfer-encoding"} & self._headers.keys())
        ):
            self._exchange = None
            self.is_closed = True
            exchange.end()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        if self._exchange is not None:
            reason = str(error) if error else "closed by the service"
            begun = "in the middle of its response" if self._exchange.has_begun else "before it responded"
            self._fail(ConnectionLost(f"connection lost {begun} ({reason})"))

    def _fail(self, error: ConnectionLost | ResponseTooLarge) -> None:
        exchange, self._exchange = self._exchange, None
        self.close()
        if exchange is not None:
            exchange.end(error)

    # -- called by the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers = {}
        self._header_count = 0
        if self._exchange is None:
            self.close()  # more than the response: the surplus could be taken for the next one

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            self._fail(ResponseTooLarge(f"it has more than {MAX_HEADERS} headers"))
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        known = self._headers.get(key)
        self._headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status >= 200 and self._exchange is not None:
            try:
                self._exchange.begin(self._status, self._headers, self._resume)
            except ResponseTooLarge as error:
                self._fail(error)

    def on_body(self, data: bytes) -> None:
        self._bodiless_bytes = 0
        if self._exchange is None:
            return
        try:
            has_room = self._exchange.feed(data)
        except ResponseTooLarge as error:
            self._fail(error)
            return
        if not has_room and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._status < 200:
            return  # an interim response: the real one follows
        exchange, self._exchange = self._exchange, None
        # The service responded before it had all of the request: it could not tell where the next one begins.
        if not self._parser.should_keep_alive() or self._transport.get_write_buffer_size():
            self.close()
        self._resume()
        if exchange is not None:
            exchange.end()

    def _resume(self) -> None:
        if self._is_paused and not self.is_closed:
            self._is_paused = False
            self._transport.resume_reading()
