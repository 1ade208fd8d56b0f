"""Hands a request to another node as bytes, over HTTP/1.1, and streams the response back. It decodes neither.

Connections are kept and used again. Every wait has a deadline: a node that is frozen accepts connections and is silent.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tinkex.clock import Clock
from tinkex.server.tls.contexts import refusal_reason

CONNECT_S = 3.0
SEND_S = 60.0
"""How long the other node may take no byte of the body."""
HEAD_S = 3600.0
"""How long it may take to respond while it lives: it may draw a long completion, or fetch an archive from a bucket."""
LOOK_S = 5.0
"""How often to look whether a node that has not responded yet still lives."""
PIECE_S = 60.0
"""How long it may be silent within a response. A stream has a comment every 15 s."""
IDLE_S = 30.0
"""How long an unused connection is kept: less than the 75 s after which the other side closes it."""
MOST_IDLE = 64
"""Unused connections that are kept for each node."""
PIECE_BYTES = 64 << 10
MAX_HEAD_BYTES = 64 << 10

Headers = Sequence[tuple[bytes, bytes]]
Lives = Callable[[], Awaitable[bool]]
OF_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-authorization")
)
"""Headers that are of one connection, not of the message. RFC 9110 7.6.1."""


class HopFailed(Exception):
    """The other node did not respond, or not to the end."""


class HopUntrusted(HopFailed):
    """What responds at the other node's address is not that node, as far as its certificate tells."""


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used_at: float = 0.0

    def abort(self) -> None:
        self.writer.transport.abort()


class HopResponse:
    """Status and headers; then the body, piece by piece, once. `abort` unless all of it was read."""

    def __init__(self, hops: Hops, url: str, connection: _Connection, status: int, headers: Headers) -> None:
        self._hops, self._url, self._connection = hops, url, connection
        self.status = status
        self.headers = [(name, value) for name, value in headers if name not in OF_CONNECTION and name != b"date"]
        self._length = next((int(value) for name, value in headers if name == b"content-length"), None)
        self._is_chunked = any(name == b"transfer-encoding" and b"chunked" in value.lower() for name, value in headers)
        self._is_kept = not any(name == b"connection" and value.lower() == b"close" for name, value in headers)

    async def short_body(self) -> bytes | None:
        """Return the whole body if it is known to be short, else None: then `pieces` has it."""
        if self._is_chunked or self._length is None or self._length > PIECE_BYTES:
            return None
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            if self._is_chunked:
                async for piece in self._chunks():
                    yield piece
            elif self._length is None and self.status not in (204, 304):
                raise HopFailed("the response has no length")
            else:
                left = self._length or 0
                while left:
                    piece = await self._read(self._connection.reader.read(min(left, PIECE_BYTES)))
                    if not piece:
                        raise HopFailed("the response ended early")
                    left -= len(piece)
                    yield piece
        except BaseException:
            self.abort()
            raise
        self._hops.give_back(self._url, self._connection, is_kept=self._is_kept)

    async def _chunks(self) -> AsyncIterator[bytes]:
        reader = self._connection.reader
        while True:
            line = await self._read(reader.readuntil(b"\r\n"))
            try:
                left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise HopFailed("a chunk has no length") from None
            if not left:
                await self._read(reader.readuntil(b"\r\n"))
                return
            while left:
                piece = await self._read(reader.read(min(left, PIECE_BYTES)))
                if not piece:
                    raise HopFailed("the response ended early")
                left -= len(piece)
                yield piece
            await self._read(reader.readexactly(2))

    async def _read(self, reading: Coroutine[object, object, bytes]) -> bytes:
        try:
            async with asyncio.timeout(PIECE_S):
                return await reading
        except (OSError, EOFError, asyncio.LimitOverrunError, TimeoutError) as error:
            raise HopFailed(f"the response broke off ({type(error).__name__})") from None

    def abort(self) -> None:
        self._connection.abort()


class Hops:
    """The connections of this server to other nodes."""

    def __init__(self, clock: Clock, tls: ssl.SSLContext | None = None) -> None:
        """`tls` has the CA of the cluster: then nothing is sent without TLS, whatever address a node has given.

        Without it nodes at https:// addresses are verified with what the machine trusts.
        """
        self._clock = clock
        self._idle: dict[str, list[_Connection]] = {}
        self._tls, self._must_encrypt = tls, tls is not None

    async def send(
        self, url: str, method: str, target: bytes, headers: Headers, body: bytes | AsyncIterator[bytes], lives: Lives
    ) -> HopResponse:
        """Send a request and return its response, of which the head has arrived. Raises HopFailed.

        It waits for as long as the other node `lives`, which is asked from time to time.
        A kept connection that turns out to be closed is replaced once: the other node closed it while it was unused.
        """
        head = _head(url, method, target, headers, body)
        if isinstance(body, bytes) and (kept := self._kept(url)) is not None:
            try:
                return await self._exchange(url, kept, head, body, lives)
            except _Closed:
                pass
        try:
            return await self._exchange(url, await self._connect(url), head, body, lives)
        except _Closed as error:
            raise HopFailed(str(error)) from None

    async def _exchange(
        self, url: str, connection: _Connection, head: bytes, body: bytes | AsyncIterator[bytes], lives: Lives
    ) -> HopResponse:
        try:
            await _write(connection.writer, head, body, is_chunked=b"\r\ntransfer-encoding: chunked\r\n" in head)
            lines = (await _read_head(connection.reader, lives)).split(b"\r\n")
            status = int(lines[0].split(b" ", 2)[1])
            found = [line.partition(b":") for line in lines[1:] if line]
        except BaseException as error:
            connection.abort()
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                raise _Closed("it closed the connection") from None
            if isinstance(error, TimeoutError | OSError | ValueError | LookupError | asyncio.LimitOverrunError):
                raise HopFailed(f"it did not respond ({type(error).__name__})") from None
            raise
        return HopResponse(self, url, connection, status, [(name.lower(), value.strip()) for name, _, value in found])

    async def _connect(self, url: str) -> _Connection:
        parts = urlsplit(url)
        if parts.scheme != "https" and self._must_encrypt:
            raise HopUntrusted("its address begins with http://, and this cluster encrypts (--cluster-ca)")
        if parts.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        try:
            async with asyncio.timeout(CONNECT_S):
                opening = asyncio.open_connection(parts.hostname, port, ssl=tls, limit=MAX_HEAD_BYTES)
                return _Connection(*await opening)
        except ssl.SSLEOFError:  # it is ending, or has too much to do
            raise HopFailed("it closed the connection") from None
        except ssl.SSLError as error:
            raise HopUntrusted(refusal_reason(error)) from None
        except (OSError, TimeoutError) as error:
            raise HopFailed(f"it cannot be reached ({type(error).__name__})") from None

    def _kept(self, url: str) -> _Connection | None:
        """Return the connection that was used last, if it was lately. Older ones are closed."""
        idle, oldest = self._idle.get(url, []), self._clock.now() - IDLE_S
        while idle and idle[0].used_at < oldest:
            idle.pop(0).abort()
        while idle:
            connection = idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.abort()
        return None

    def give_back(self, url: str, connection: _Connection, *, is_kept: bool) -> None:
        idle = self._idle.setdefault(url, [])
        if not is_kept or len(idle) >= MOST_IDLE:
            connection.abort()
            return
        connection.used_at = self._clock.now()
        idle.append(connection)

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()


class _Closed(Exception):
    """The connection was closed before a response came."""


def _head(url: str, method: str, target: bytes, headers: Headers, body: bytes | AsyncIterator[bytes]) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (method.encode(), target), b"host: " + urlsplit(url).netloc.encode()]
    # One Host, or proxies reject it (RFC 9112 3.2).
    lines += [name + b": " + value for name, value in headers if name != b"host"]
    if isinstance(body, bytes):
        lines.append(b"content-length: %d" % len(body))
    elif not _is_sized(headers):
        lines.append(b"transfer-encoding: chunked")
    return b"\r\n".join([*lines, b"", b""])


def _is_sized(headers: Headers) -> bool:
    """Whether the length of a body that comes in pieces is known: quotas need it before the first piece."""
    return any(name == b"content-length" for name, _ in headers)


async def _write(
    writer: asyncio.StreamWriter, head: bytes, body: bytes | AsyncIterator[bytes], *, is_chunked: bool
) -> None:
    if isinstance(body, bytes) and len(body) <= PIECE_BYTES:
        writer.write(head + body)  # in one packet: the other node wakes up once
        await _drain(writer)
        return
    writer.write(head)
    if isinstance(body, bytes):
        view = memoryview(body)
        for at in range(0, len(view), PIECE_BYTES):  # a large body written at once would be copied whole
            writer.write(view[at : at + PIECE_BYTES])
            await _drain(writer)
        await _drain(writer)
        return
    async for piece in body:
        if piece:
            writer.writelines((b"%x\r\n" % len(piece), piece, b"\r\n") if is_chunked else (piece,))
            await _drain(writer)
    if is_chunked:
        writer.write(b"0\r\n\r\n")
    await _drain(writer)


async def _read_head(reader: asyncio.StreamReader, lives: Lives) -> bytes:
    reading = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
    try:
        async with asyncio.timeout(HEAD_S):
            while not (await asyncio.wait([reading], timeout=LOOK_S))[0]:
                if not await lives():
                    raise HopFailed("it is silent and has not renewed its lease")
        return reading.result()
    finally:
        reading.cancel()


async def _drain(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(SEND_S):
        await writer.drain()
