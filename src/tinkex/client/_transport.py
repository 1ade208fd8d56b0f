"""The HTTP library, hidden: one place knows pyqwest. Why it was chosen: docs/decisions/http-library.md.

Each kind of traffic has its own pool of connections, so a burst of samples never delays a heartbeat. Redirects are
followed only within the same origin: a key never travels to another host. The library's threads do not survive a fork:
a forked child speaks through `_plain_http` instead.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urljoin, urlsplit

from tinkex.client._loop import after_fork_in_child
from tinkex.errors import APIConnectionError, APIResponseValidationError, APITimeoutError, ConfigError
from tinkex.settings import Config
from tinkex.wire.endpoints import Pool

if TYPE_CHECKING:
    import pyqwest

    from tinkex.client._plain_http import PlainClient, PlainStream

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 60.0
REDIRECTS = 5


Headers = Mapping[str, str]
"""An answer's headers, under lower-case names."""


class Answer(NamedTuple):
    """A whole answer of any status."""

    status: int
    headers: Headers
    content: bytes


class StreamedAnswer:
    """An answer whose body is read piece by piece."""

    def __init__(self, response: pyqwest.Response | PlainStream, timeout_s: float) -> None:
        self.status = response.status
        self.headers = cast(Headers, response.headers)
        self._response = response
        self._timeout_s = timeout_s

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Silence longer than the timeout is an error."""
        source = aiter(self._response.content)
        while True:
            with _translated():
                try:
                    async with asyncio.timeout(self._timeout_s):
                        piece = await anext(source)
                except StopAsyncIteration:
                    return
            yield bytes(piece)

    async def whole(self) -> Answer:
        return Answer(self.status, self.headers, b"".join([piece async for piece in self.chunks()]))


class Transport:
    """Pools of connections towards one service."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ca = _read_ca(config.ca_file)
        self._clients: dict[Pool, pyqwest.Client | PlainClient] = {}
        self._origin = urlsplit(config.base_url)[:2]

    async def send(
        self,
        pool: Pool,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes,
        timeout_s: float,
        *,
        follow: bool = True,
    ) -> Answer:
        """One exchange. Raises APIConnectionError or APITimeoutError; any status is an answer."""
        client = self._clients.get(pool) or self._make(pool)
        for _ in range(REDIRECTS):
            with _translated():
                async with asyncio.timeout(timeout_s):
                    found = await client.execute(method, url, headers, content or None)
            if not (follow and found.status in (301, 302, 303, 307, 308)):
                return Answer(found.status, cast(Headers, found.headers), found.content)
            url = self._next_url(url, found.headers.get("location"))
        raise APIConnectionError(None, f"{method} {url}: more than {REDIRECTS} redirects.")

    @asynccontextmanager
    async def open(
        self, pool: Pool, method: str, url: str, headers: Mapping[str, str], content: bytes, timeout_s: float
    ) -> AsyncIterator[StreamedAnswer]:
        """An exchange whose answer is read piece by piece; leaving the block closes it."""
        client = self._clients.get(pool) or self._make(pool)
        with _translated():
            async with asyncio.timeout(timeout_s):
                opened = client.stream(method, url, headers, content or None)
                response = await opened.__aenter__()
        try:
            yield StreamedAnswer(response, timeout_s)
        finally:
            await opened.__aexit__(None, None, None)

    def _make(self, pool: Pool) -> pyqwest.Client | PlainClient:
        client = self._clients[pool] = self._plain(pool) if _is_forked else self._fast(pool)
        return client

    def _plain(self, pool: Pool) -> PlainClient:
        from tinkex.client._plain_http import PlainClient

        return PlainClient(
            size=self._config.pools[pool.value],
            ca=self._ca,
            proxy=self._config.proxy,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            idle_s=IDLE_S,
        )

    def _fast(self, pool: Pool) -> pyqwest.Client:
        import pyqwest

        size = self._config.pools[pool.value]
        transport = pyqwest.HTTPTransport(
            tls_ca_cert=self._ca,
            tls_include_system_certs=True,
            proxy=self._config.proxy,
            connect_timeout=CONNECT_TIMEOUT_S,
            pool_idle_timeout=IDLE_S,
            pool_max_idle_per_host=size,
            max_connections_per_address=size,
            follow_redirects=False,
            enable_otel=False,
        )
        return pyqwest.Client(transport)

    def _next_url(self, url: str, location: str | None) -> str:
        target = urljoin(url, location or "")
        if urlsplit(target)[:2] != self._origin:
            raise APIResponseValidationError(
                message=f"{url} redirects to another host ({urlsplit(target).netloc}); the key is not sent there. "
                "If that is the service's new address, set it as base_url."
            )
        return target


class _translated:
    """Turns the library's exceptions into ours. A class, not a generator: it sits on the hottest path."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: object) -> None:
        if problem is None or isinstance(problem, (asyncio.CancelledError, StopAsyncIteration, GeneratorExit)):
            return
        if isinstance(problem, TimeoutError):
            raise APITimeoutError(None, f"No answer in time ({_text(problem)}).") from None
        if isinstance(problem, OSError) or type(problem).__module__.startswith("pyqwest"):
            raise APIConnectionError(None, f"Connection error: {_text(problem)}") from None


def _text(problem: BaseException) -> str:
    return str(problem) or type(problem).__name__


def _read_ca(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as problem:
        raise ConfigError(f"ca_file {path} cannot be read: {problem.strerror}.") from None


_transports: dict[Any, Transport] = {}
_lock = threading.Lock()


def transport_for(config: Config) -> Transport:
    """The pools of one (base URL, key): shared by all clients with the same pool settings."""
    key = (*config.key, tuple(sorted(config.pools.items())), config.proxy, config.ca_file)
    with _lock:
        if key not in _transports:
            _transports[key] = Transport(config)
        return _transports[key]


_is_forked = False
"""Whether this process was forked from one that had loaded the HTTP library."""
_left_behind: list[object] = []


def _forget() -> None:
    global _lock, _is_forked
    _lock = threading.Lock()
    _is_forked = _is_forked or "pyqwest" in sys.modules
    # Kept, not freed: freeing them may wait for locks of threads that exist only in the parent.
    _left_behind.append(dict(_transports))
    _transports.clear()


after_fork_in_child(_forget)
