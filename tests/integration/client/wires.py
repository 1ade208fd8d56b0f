"""What stands between a client and the scripted service in the transport tests: TLS with HTTP/2, proxies, odd framings.

All of it listens on loopback, on threads of its own, and ends with its `with` block.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import trustme
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings
from hypercorn.asyncio import serve
from hypercorn.config import Config, Sockets
from hyperframe.frame import GoAwayFrame

from tinkex.testing import Request, ScriptedService
from tinkex.testing.http.messages import Response

T = TypeVar("T")


class Authority:
    """A certificate authority that no machine knows."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.file = str(folder / "authority.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def certify(self, *names: str) -> str:
        """A file with a key and a certificate for these hosts."""
        path = self._folder / f"{'-'.join(names).replace(':', '_')}.pem"
        self._ca.issue_cert(*names).private_key_and_cert_chain_pem.write_to_path(str(path))
        return str(path)


class _Threaded:
    """A loop on a thread, from `start` to `stop`."""

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._open())

    def stop(self) -> None:
        self.run(self._close())
        self.run(self._settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _settle(self) -> None:
        # More than once: a connection that was accepted at the last moment has its task only now.
        while rest := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    async def _open(self) -> None: ...

    async def _close(self) -> None: ...

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Front(_Threaded):
    """hypercorn before a scripted service: TLS, HTTP/2, and answers in pieces of unknown total length."""

    def __init__(
        self,
        service: ScriptedService,
        certificate: str | None = None,
        *,
        host: str = "127.0.0.1",
        alpn: tuple[str, ...] = ("h2", "http/1.1"),
    ) -> None:
        self._service = service
        self._host = host
        self._config = Config()
        self._config.certfile = self._config.keyfile = certificate
        self._config.alpn_protocols = list(alpn)
        self._config.loglevel = "CRITICAL"
        self._config.graceful_timeout = 0.2
        self._port = 0
        self.versions: set[str] = set()
        self.clients: set[tuple[str, int]] = set()

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._config.certfile else 'http'}://{host}:{self._port}"

    async def _open(self) -> None:
        bound = socket.create_server(
            (self._host, self._port), family=socket.AF_INET6 if ":" in self._host else socket.AF_INET, backlog=1024
        )
        bound.setblocking(False)
        self._port = bound.getsockname()[1]
        sockets = Sockets([bound], [], []) if self._config.certfile else Sockets([], [bound], [])
        self._config.create_sockets = lambda: sockets  # type: ignore[method-assign]
        self._over = asyncio.Event()
        self._serving = asyncio.create_task(serve(self._app, self._config, shutdown_trigger=self._over.wait))

    async def _close(self) -> None:
        self._over.set()
        # It stumbles over clients that go on sending after the last word of TLS.
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _app(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            return
        self.versions.add(scope["http_version"])
        self.clients.add(tuple(scope["client"]))
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        target = scope["raw_path"].decode() + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
        request = Request(scope["method"], target, headers)
        request.body = body
        response = await ask(self._service, request)
        kind = (b"content-type", response.content_type.encode())
        extra = [(name.encode(), value.encode()) for name, value in (response.headers or {}).items()]
        await send({"type": "http.response.start", "status": response.status, "headers": [kind, *extra]})
        for start in range(0, len(response.body), 1 << 15):
            piece = response.body[start : start + (1 << 15)]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def ask(service: ScriptedService, request: Request) -> Response:
    """What the service answers, without a connection of its own."""

    async def on_its_loop() -> Response:
        service._refuse_head(request)
        reply = await service._handle(request)
        assert reply is not None, "no connection to drop"
        if reply.stream is not None:
            reply.body = b"".join([piece async for piece in reply.stream])
        return reply

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(on_its_loop(), service._loop))


class Frames(_Threaded):
    """HTTP/2 frame by frame before a scripted service, as odd as the protocol allows.

    `oddity(request)` is asked when a request's headers are there: "refuse", "silent", "early" (413 before the body was
    read), "goaway" (leaving, but this one is still answered), or "" for an answer like any other.
    """

    def __init__(
        self,
        service: ScriptedService,
        certificate: str,
        oddity: Callable[[Request], str],
        *,
        streams: int = 100,
        settings_after_s: float = 0.0,
    ) -> None:
        self._service = service
        self._oddity = oddity
        self._streams = streams
        self._settings_after_s = settings_after_s
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(certificate)
        self._tls.set_alpn_protocols(["h2"])
        self.port = 0
        self.connections = 0
        self.most_streams = 0
        self.resets: list[int] = []

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        allowed = {SettingCodes.MAX_CONCURRENT_STREAMS: self._streams}
        link.local_settings = Settings(client=False, initial_values=allowed)
        link.initiate_connection()
        await asyncio.sleep(self._settings_after_s)
        writer.write(link.data_to_send())
        wanted: dict[int, tuple[Request, str]] = {}
        tasks: set[asyncio.Task[None]] = set()
        try:
            while data := await reader.read(1 << 16):
                for event in link.receive_data(data):
                    number = getattr(event, "stream_id", 0) or 0
                    match event:
                        case events.RequestReceived():
                            pairs: dict[Any, Any] = dict(event.headers or ())
                            request = Request(pairs[":method"], pairs[":path"], pairs, self.connections)
                            self._begin(link, number, request, wanted)
                            self.most_streams = max(self.most_streams, link.open_inbound_streams)
                        case events.DataReceived():
                            if number in wanted:
                                wanted[number][0].body += event.data or b""
                            link.acknowledge_received_data(event.flow_controlled_length or 0, number)
                        case events.StreamEnded() if number in wanted:
                            task = asyncio.create_task(self._reply(link, writer, number, *wanted.pop(number)))
                            tasks.add(task)
                            task.add_done_callback(tasks.discard)
                        case events.StreamReset():
                            self.resets.append(number)
                            wanted.pop(number, None)
                writer.write(link.data_to_send())
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _begin(self, link: H2Connection, number: int, request: Request, wanted: dict[int, tuple[Request, str]]) -> None:
        oddity = self._oddity(request)
        if oddity == "refuse":
            link.reset_stream(number, ErrorCodes.REFUSED_STREAM)
        elif oddity == "early":
            _write(link, number, Response(413, b'{"detail": "at most 1 MB"}'))
        elif oddity != "silent":
            wanted[number] = (request, oddity)

    async def _reply(
        self, link: H2Connection, writer: asyncio.StreamWriter, number: int, request: Request, oddity: str
    ) -> None:
        if oddity == "goaway":
            leaving = GoAwayFrame(0)
            leaving.last_stream_id = number
            writer.write(leaving.serialize())
            await writer.drain()
        response = await ask(self._service, request)
        if number not in self.resets:
            _write(link, number, response)
            writer.write(link.data_to_send())


def _write(link: H2Connection, number: int, response: Response) -> None:
    link.send_headers(number, [(":status", str(response.status)), ("content-type", response.content_type)])
    for start in range(0, len(response.body), 1 << 14):
        link.send_data(number, response.body[start : start + (1 << 14)])
    link.end_stream(number)


class Raw(_Threaded):
    """A TCP server; each connection is handed to `handle`."""

    def __init__(
        self, handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], scheme: str = "http"
    ) -> None:
        self._handle = handle
        self._scheme = scheme
        self.port = 0

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._guarded, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._handle(reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # the client has gone, or the test is over
        finally:
            writer.close()


class Pipe(Raw):
    """A line to another port that can go dead: what is open then stays open, and nothing moves on it any more."""

    def __init__(self, port: int, scheme: str = "http") -> None:
        super().__init__(self._serve, scheme)
        self._target = port
        self.opened = 0
        self.dead = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        number = self.opened
        upstream = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._move(number, reader, upstream[1]), self._move(number, upstream[0], writer))

    async def _move(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if number > self.dead:
                writer.write(data)
                await writer.drain()
        writer.close()

    def die(self) -> None:
        """All connections that are open now."""
        self.dead = self.opened


class Proxy(Raw):
    """A forward proxy, with CONNECT. `seen` holds the first line of each connection."""

    def __init__(self, password: str | None = None) -> None:
        super().__init__(self._serve)
        self._expected = None if password is None else "Basic " + base64.b64encode(password.encode()).decode()
        self.seen: list[str] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_head(reader)
        self.seen.append(head[""])
        if self._expected is not None and head.get("proxy-authorization") != self._expected:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            return
        method, target, _ = head.pop("").split(" ")
        place, path = target, ""
        if method != "CONNECT":
            place, _, path = target.removeprefix("http://").partition("/")
        host, _, port = place.rpartition(":")
        upstream = await asyncio.open_connection(host.strip("[]"), int(port))
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            head.pop("proxy-authorization", None)
            lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
            upstream[1].write(f"{method} /{path} HTTP/1.1\r\n{lines}\r\n".encode())
        await asyncio.gather(_copy(reader, upstream[1]), _copy(upstream[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def read_head(reader: asyncio.StreamReader) -> dict[str, str]:
    """A request's headers; its first line under ""."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return {"": first, **{name.lower(): value.strip() for name, _, value in pairs}}


def can_bind(host: str) -> bool:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True
