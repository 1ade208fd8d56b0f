"""A small HTTP/1.1 server on 127.0.0.1, on its own thread, with connections that can be reset and a life that can end.

It knows nothing of the API. It exists so that the scripted service needs no dependency and can misbehave on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import logging
import os
import socket
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Self

from tinkex.testing.http.messages import Reply, Request, Response

log = logging.getLogger("tinkex.testing")

_REASONS = {status.value: status.phrase for status in http.HTTPStatus}
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: closing sends RST, not FIN
_HEAD_LIMIT = 1 << 18


class HttpServer(ABC):
    """Listens on 127.0.0.1 and hands every complete request to `_handle`, on the server's own loop thread."""

    def __init__(self) -> None:
        self.peak_connections: int = 0
        self.accepted_connections: int = 0
        """How many there have been in all."""
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._listener: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinkex-testing", daemon=True)
        _watch_forks()
        _servers.add(self)

    @abstractmethod
    def _refuse_head(self, request: Request) -> bool:
        """Whether to reset the connection once the headers are there."""

    @abstractmethod
    async def _handle(self, request: Request) -> Reply: ...

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The `base_url` for clients."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._connections)

    def start(self) -> None:
        """Listen. After `kill`, on the same port and with the same memory."""
        if self._loop.is_closed():
            raise RuntimeError("this service was stopped: make a new one (one that was killed can start again)")
        if not self._thread.is_alive():
            self._thread.start()
        self._run(self._listen())

    def stop(self) -> None:
        """End the service and its thread. Connections are reset."""
        if self._thread.is_alive():
            self.kill()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def kill(self) -> None:
        """Go dead in mid-run: nobody listens any more, every connection is reset. `start` brings it back."""
        if self._thread.is_alive():
            self._run(self._close())

    def _let_go(self) -> None:
        """In a forked child: give up the inherited sockets, else a connection closed in the parent would stay open."""
        listening = self._listener.sockets if self._listener is not None else ()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for sock in (*listening, *(connection.sock for connection in self._connections)):
            if sock.fileno() >= 0:
                # Overwritten, not closed: objects in the child still own these numbers and will close them.
                os.dup2(nowhere, sock.fileno())
        os.close(nowhere)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        # 2,000 clients may connect at once; the kernel caps the backlog at its own limit.
        self._listener = await self._loop.create_server(
            lambda: Connection(self), "127.0.0.1", self._port, backlog=4096, reuse_address=True
        )
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


_servers: weakref.WeakSet[HttpServer] = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    def let_go_of_all() -> None:
        for server in list(_servers):
            server._let_go()

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=let_go_of_all)


class Connection(asyncio.StreamReaderProtocol):
    """One client's connection: requests are read and answered one after the other.

    Keep-alive, sized and chunked bodies; responses may wait, stream, break off or reset it.
    """

    def __init__(self, server: HttpServer) -> None:
        super().__init__(asyncio.StreamReader(_HEAD_LIMIT, server._loop), self._opened, server._loop)
        self._server = server

    def _opened(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = self._server
        self.writer = writer
        server._connections.add(self)
        server.accepted_connections += 1
        self.number = server.accepted_connections
        server.peak_connections = max(server.peak_connections, len(server._connections))
        task = server._loop.create_task(self._serve(reader, writer))
        server._tasks.add(task)
        task.add_done_callback(server._tasks.discard)

    @property
    def sock(self) -> socket.socket:
        sock: socket.socket = self.writer.get_extra_info("socket")
        return sock

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # closes this side too: a client that left is no open connection, even while its request hangs

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server._connections.discard(self)

    def reset(self) -> None:
        """Close with a RST: the client sees "connection reset by peer"."""
        if not self.writer.is_closing():
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):  # the client has gone
            try:
                while await self._serve_one(reader, writer):
                    pass
            except (ValueError, asyncio.LimitOverrunError) as error:
                await _write(writer, Response(400, f'{{"detail": "bad HTTP: {error}"}}'.encode()))
        writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. False if that was the connection's last."""
        request = _request(await reader.readuntil(b"\r\n\r\n"), self.number)
        if self._server._refuse_head(request):
            self.reset()
            return False
        if request.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.body = await _body(reader, request.headers)
        try:
            response = await self._server._handle(request)
        except Exception:
            log.exception("the scripted service failed on %s %s", request.method, request.path)
            response = Response(500, b'{"detail": "the scripted service has a bug, see its log", "code": "bug"}')
        if response is None:
            self.reset()
            return False
        request.status = response.status
        await _write(writer, response, is_head=request.method == "HEAD")
        # When cut, not a reset: what was written must arrive first.
        return not response.cut and request.headers.get("connection", "").lower() != "close"


def _request(head: bytes, connection: int) -> Request:
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, target, version = first.split(" ")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name = name.lower()
        headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return Request(method, target, headers, connection)


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", "").lower():
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = bytearray()
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    while (await reader.readline()).strip():
        pass  # trailers, up to the blank line
    return bytes(body)


async def _write(writer: asyncio.StreamWriter, response: Response, is_head: bool = False) -> None:
    body, size = response.body, len(response.body)
    if response.stream is not None:
        writer.write(_head(response, "transfer-encoding: chunked\r\n"))
        async for piece in _first_half(response.stream) if response.cut else response.stream:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"" if response.cut else b"0\r\n\r\n")
    elif response.cut:
        writer.write(_head(response, f"content-length: {max(1, size)}\r\n") + body[: size // 2])
    elif response.status in (204, 304):  # these have no body, and clients do not look for one
        writer.write(_head(response, ""))
    else:
        head = _head(response, f"content-length: {size}\r\n")
        writer.write(head if is_head else head + body)
    await writer.drain()


async def _first_half(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    pieces = [piece async for piece in stream]
    for piece in pieces[: len(pieces) // 2]:
        yield piece


def _head(response: Response, length: str) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (response.headers or {}).items())
    reason = _REASONS.get(response.status, "Unknown")
    kind = f"content-type: {response.content_type}\r\n" if response.content_type else ""
    return f"HTTP/1.1 {response.status} {reason}\r\n{kind}{length}{lines}\r\n".encode("latin-1")
