"""One HTTP/1.1 connection: keep-alive, sized and chunked bodies; responses may wait, stream, break off or reset it."""

from __future__ import annotations

import asyncio
import http
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING

from tinkex.testing.http.messages import Reply, Request, Response

if TYPE_CHECKING:
    from tinkex.testing.http.server import HttpServer

log = logging.getLogger("tinkex.testing")

_REASONS = {status.value: status.phrase for status in http.HTTPStatus}
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: closing sends RST, not FIN
_HEAD_LIMIT = 1 << 18


class Connection(asyncio.Protocol):
    """One client's connection: requests are read and answered one after the other."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._request: Request | None = None
        self._chunks: list[bytes] = []
        self._is_busy = False
        self._is_open = True
        self._drained = asyncio.Event()
        self._number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._drained.set()
        server = self._server
        server.connections.add(self)
        server.accepted_connections += 1
        self._number = server.accepted_connections
        server.peak_connections = max(server.peak_connections, len(server.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_open = False
        self._drained.set()
        self._server.connections.discard(self)

    @property
    def sock(self) -> socket.socket:
        sock: socket.socket = self._transport.get_extra_info("socket")
        return sock

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_busy:
            self._advance()

    def reset(self) -> None:
        """Close with a RST: the client sees "connection reset by peer"."""
        if self._is_open:
            self._is_open = False
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()

    def _advance(self) -> None:
        try:
            while self._is_open and not self._is_busy:
                request = self._request or self._read_head()
                if request is None:
                    return
                self._request = request
                body = self._read_body(request)
                if body is None:
                    return
                self._request = None
                request.body = body
                self._dispatch(request)
        except ValueError as error:
            self._write(Request("?", "", {}), Response(400, f'{{"detail": "bad HTTP: {error}"}}'.encode()))
            self._transport.close()
            self._is_open = False

    def _read_head(self) -> Request | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _HEAD_LIMIT:
                raise ValueError("endless headers")
            return None
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        method, target, version = first.split(" ")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            name = name.lower()
            headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
        request = Request(method, target, headers, self._number)
        if version == "HTTP/1.0":
            headers.setdefault("connection", "close")
        if self._server.refuse_head(request):
            self.reset()
            return None
        if headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return request

    def _read_body(self, request: Request) -> bytes | None:
        buffer = self._buffer
        if "chunked" in request.headers.get("transfer-encoding", "").lower():
            return self._read_chunks()
        size = int(request.headers.get("content-length", 0))
        if size == 0:
            return b""
        if len(buffer) < size:
            return None
        body = bytes(buffer) if len(buffer) == size else bytes(memoryview(buffer)[:size])
        del buffer[:size]
        return body

    def _read_chunks(self) -> bytes | None:
        buffer = self._buffer
        while (line := buffer.find(b"\r\n")) >= 0:
            size = int(bytes(buffer[:line]).split(b";")[0], 16)
            end = line + 2 + size
            if len(buffer) < end + 2:
                return None
            if size:
                self._chunks.append(bytes(buffer[line + 2 : end]))
                del buffer[: end + 2]
                continue
            trailer = buffer.find(b"\r\n\r\n", line)  # with no trailers, the blank line closes at once
            if trailer < 0:
                return None
            del buffer[: trailer + 4]
            body, self._chunks = b"".join(self._chunks), []
            return body
        return None

    def _dispatch(self, request: Request) -> None:
        self._is_busy = True
        try:
            reply = self._server.handle(request)
        except Exception:
            reply = _bug(request)
        if reply is None or (isinstance(reply, Response) and reply.stream is None and not reply.cut):
            self._finish(request, reply)
        else:
            task = self._server.loop.create_task(self._wait(request, reply))
            self._server.tasks.add(task)
            task.add_done_callback(self._server.tasks.discard)

    async def _wait(self, request: Request, reply: Reply | Awaitable[Reply]) -> None:
        try:
            reply = reply if reply is None or isinstance(reply, Response) else await reply
            if reply is not None and self._is_open and (reply.stream is not None or reply.cut):
                await self._write_slowly(request, reply)
                return
        except Exception:
            reply = _bug(request)
        self._finish(request, reply)
        self._advance()

    def _finish(self, request: Request, reply: Reply) -> None:
        self._is_busy = False
        if reply is None:
            self.reset()
        elif self._is_open:
            self._write(request, reply)
            if request.headers.get("connection", "").lower() == "close":
                self._is_open = False
                self._transport.close()

    def _write(self, request: Request, response: Response) -> None:
        request.status = response.status
        if response.status in (204, 304):  # these have no body, and clients do not look for one
            self._transport.write(_head(response, ""))
            return
        head = _head(response, f"content-length: {len(response.body)}\r\n")
        self._transport.write(head if request.method == "HEAD" else head + response.body)

    async def _write_slowly(self, request: Request, response: Response) -> None:
        request.status = response.status
        write = self._transport.write
        if response.stream is None:
            write(_head(response, f"content-length: {max(1, len(response.body))}\r\n"))
            write(response.body[: len(response.body) // 2])
        else:
            write(_head(response, "transfer-encoding: chunked\r\n"))
            stream = _first_half(response.stream) if response.cut else response.stream
            async for piece in stream:
                if not self._is_open:
                    return
                write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await self._drained.wait()
        if response.cut:
            # Not a reset: what was written must arrive first.
            self._is_open = False
            self._transport.close()
            return
        write(b"0\r\n\r\n")
        self._is_busy = False
        self._advance()


async def _first_half(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    pieces = [piece async for piece in stream]
    for piece in pieces[: len(pieces) // 2]:
        yield piece


def _head(response: Response, length: str) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (response.headers or {}).items())
    reason = _REASONS.get(response.status, "Unknown")
    kind = f"content-type: {response.content_type}\r\n" if response.content_type else ""
    return f"HTTP/1.1 {response.status} {reason}\r\n{kind}{length}{lines}\r\n".encode("latin-1")


def _bug(request: Request) -> Response:
    log.exception("the scripted service failed on %s %s", request.method, request.path)
    return Response(500, b'{"detail": "the scripted service has a bug, see its log", "code": "bug"}')
