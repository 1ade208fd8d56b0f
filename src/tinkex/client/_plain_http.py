"""HTTP/1.1 on asyncio alone, for forked children: the HTTP library's own threads do not survive a fork, its requests
would hang there for ever. Offers the two calls of that library which `_transport` uses, at a higher cost per request.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

PIECE = 1 << 16
HEAD_BYTES = 1 << 17
PORTS = {"http": 80, "https": 443}


class PlainResponse(NamedTuple):
    """A whole answer."""

    status: int
    headers: dict[str, str]
    content: bytes


class PlainStream(NamedTuple):
    """An answer whose body is still arriving."""

    status: int
    headers: dict[str, str]
    content: AsyncIterator[bytes]


class Place(NamedTuple):
    """Where a request goes: connections are reused for the same place only."""

    scheme: str
    host: str
    port: int
    proxy: str | None


class PlainClient:
    """Up to `size` connections at once, kept for `idle_s` between requests. Loop thread."""

    def __init__(
        self, *, size: int, ca: bytes | None, proxy: str | None, connect_timeout_s: float, idle_s: float
    ) -> None:
        self._free = asyncio.Semaphore(size)
        self._ca = ca
        self._proxy = proxy
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._idle: dict[Place, list[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def execute(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> PlainResponse:
        async with self.stream(method, url, headers, content) as answer:
            return PlainResponse(answer.status, answer.headers, b"".join([piece async for piece in answer.content]))

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes | None
    ) -> AsyncIterator[PlainStream]:
        place = self._place(url)
        request = _request(method, url, headers, content, place.proxy)
        async with self._free:
            connection = await self._ask(place, request)
            try:
                async with aclosing(connection.body(method)) as body:
                    yield PlainStream(connection.status, connection.headers, body)
            finally:
                self._keep(place, connection)

    async def _ask(self, place: Place, request: bytes) -> _Connection:
        """Send and read the head of the answer. A kept connection that turns out dead is replaced."""
        while True:
            connection = self._reusable(place) or await self._connect(place)
            try:
                await connection.exchange(request)
                return connection
            except OSError:
                connection.close()
                if not connection.was_used:
                    raise
            except BaseException:
                connection.close()
                raise

    def _reusable(self, place: Place) -> _Connection | None:
        kept = self._idle.get(place, [])
        oldest = asyncio.get_running_loop().time() - self._idle_s
        while kept:
            connection = kept.pop()
            if connection.idle_since >= oldest and connection.is_open:
                return connection
            connection.close()
        return None

    def _keep(self, place: Place, connection: _Connection) -> None:
        if connection.is_reusable and connection.is_open:
            connection.was_used = True
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.setdefault(place, []).append(connection)
        else:
            connection.close()

    async def _connect(self, place: Place) -> _Connection:
        async with asyncio.timeout(self._connect_timeout_s):
            is_tls = place.scheme == "https"
            if place.proxy is None:
                context = self._context() if is_tls else None
                streams = await asyncio.open_connection(place.host, place.port, ssl=context, limit=HEAD_BYTES)
                return _Connection(*streams)
            proxy = urlsplit(place.proxy)
            if proxy.scheme != "http" or not proxy.hostname:
                raise OSError(f"a forked process reaches the service through http:// proxies only, not {proxy.scheme}")
            streams = await asyncio.open_connection(proxy.hostname, proxy.port or 80, limit=HEAD_BYTES)
            connection = _Connection(*streams)
            if is_tls:
                try:
                    await connection.exchange(_connect_request(place))
                    if connection.status != 200:
                        raise OSError(f"the proxy answered {connection.status} to CONNECT")
                    await streams[1].start_tls(self._context(), server_hostname=place.host)
                except BaseException:
                    connection.close()
                    raise
            return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            if self._ca is not None:
                self._tls.load_verify_locations(cadata=self._ca.decode("ascii", "replace"))
        return self._tls

    def _place(self, url: str) -> Place:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        proxy = self._proxy
        if proxy is None:
            found = urllib.request.getproxies()  # the environment's, as the HTTP library reads them
            named = found.get(parts.scheme) or found.get("all")
            if named and not urllib.request.proxy_bypass(host):
                proxy = named
        return Place(parts.scheme, host, port, proxy)


class _Connection:
    """One connection and the answer that is being read from it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self._is_kept = False
        self.is_reusable = False
        """Whether the last answer was read to its end and the service keeps the connection open."""
        self.was_used = False
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    async def exchange(self, request: bytes) -> None:
        """Send a request and read the head of its answer."""
        self.is_reusable = False
        self._writer.write(request)
        await self._writer.drain()
        self.status = 0
        with _sound():
            while self.status < 200:  # 1xx announce the answer, they are none
                lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                version, status, *_ = lines[0].split(" ", 2)
                self.status = int(status)
        fields = (line.partition(":") for line in lines[1:] if line)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        self._is_kept = version == "HTTP/1.1" and "close" not in self.headers.get("connection", "").lower()

    async def body(self, method: str) -> AsyncGenerator[bytes, None]:
        has_end = True
        with _sound():
            if method == "HEAD" or self.status in (204, 304):
                pass
            elif "chunked" in self.headers.get("transfer-encoding", "").lower():
                while size := int((await self._reader.readline()).split(b";")[0], 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
                while (await self._reader.readline()).strip():
                    pass  # trailers: nothing of ours is in them
            elif "content-length" in self.headers:
                left = int(self.headers["content-length"])
                while left:
                    piece = await self._reader.readexactly(min(left, PIECE))
                    left -= len(piece)
                    yield piece
            else:
                has_end = False
                while piece := await self._reader.read(PIECE):
                    yield piece
        self.is_reusable = has_end and self._is_kept


class _sound:
    """An answer that breaks off or cannot be read is a fault of the connection."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: object) -> None:
        if isinstance(problem, EOFError):
            raise ConnectionResetError("the connection was closed in mid-answer") from None
        if isinstance(problem, (ValueError, IndexError, asyncio.LimitOverrunError)):
            raise ConnectionError(f"the answer is not HTTP/1.1: {problem}") from None


def _request(method: str, url: str, headers: Mapping[str, str], content: bytes | None, proxy: str | None) -> bytes:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = {"host": parts.netloc.rpartition("@")[2], **headers}
    if content is not None or method in ("POST", "PUT", "PATCH"):
        lines["content-length"] = str(len(content or b""))
    if proxy is not None and parts.scheme == "http":
        target = f"http://{lines['host']}{target}"
        lines.update(_proxy_auth(proxy))
    return _head(f"{method} {target}", lines) + (content or b"")


def _connect_request(place: Place) -> bytes:
    target = f"{place.host}:{place.port}"
    return _head(f"CONNECT {target}", {"host": target, **_proxy_auth(place.proxy or "")})


def _proxy_auth(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"proxy-authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _head(start: str, lines: Mapping[str, str]) -> bytes:
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    if text.count("\n") != len(lines) or "\n" in start:
        raise ValueError("a header holds a line break")
    return f"{start} HTTP/1.1\r\n{text}\r\n".encode("latin-1", "replace")
