"""Sends requests over pools of connections, one for each kind of traffic: a burst of samples delays no heartbeat.

HTTP/1.1, or HTTP/2 where TLS negotiates it; why no HTTP library: docs/decisions/http-library.md. Redirects are followed
only within the same origin: a key never travels to another host.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from tinkex import settings
from tinkex.client._http.dial import Origin, tls_context
from tinkex.client._http.exchange import Exchange, Lost, Request, Silent
from tinkex.client._http.pool import ConnectionPool, ConnectTimeout
from tinkex.client._runtime.loop import after_fork_in_child
from tinkex.errors import APIConnectionError, APIResponseValidationError, APITimeoutError, ValidationError
from tinkex.settings import Config
from tinkex.wire.body import decompress
from tinkex.wire.endpoints import Pool

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

    def __init__(self, exchange: Exchange, timeout_s: float) -> None:
        self.status = exchange.status
        self.headers: Headers = exchange.headers
        self._exchange = exchange
        self._timeout_s = timeout_s

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Silence longer than the timeout is an error."""
        source = aiter(self._exchange.pieces())
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    piece = await anext(source)
            except StopAsyncIteration:
                return
            except (Lost, Silent, OSError) as problem:
                raise _translated(problem, "reading the answer") from None
            yield piece

    async def whole(self) -> Answer:
        return Answer(self.status, self.headers, b"".join([piece async for piece in self.chunks()]))


class Transport:
    """Pools towards one service, and towards the hosts its download addresses name. Loop thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tls: ssl.SSLContext | None = None
        self._pools: dict[tuple[Pool, Origin], ConnectionPool] = {}
        self._places: dict[str, tuple[Origin, str, str]] = {}
        self._base = urlsplit(config.base_url)[:2]

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
        for _ in range(REDIRECTS):
            exchange = await self._exchange(pool, method, url, headers, content, timeout_s, False)
            if not (follow and exchange.status in (301, 302, 303, 307, 308)):
                return _whole(exchange)
            url = self._next_url(url, exchange.headers.get("location"))
        raise APIResponseValidationError(message=f"{method} {url}: more than {REDIRECTS} redirects.")

    @asynccontextmanager
    async def open(
        self, pool: Pool, method: str, url: str, headers: Mapping[str, str], content: bytes, timeout_s: float
    ) -> AsyncIterator[StreamedAnswer]:
        """An exchange whose answer is read piece by piece; leaving the block early ends it."""
        exchange = await self._exchange(pool, method, url, headers, content, timeout_s, True)
        try:
            yield StreamedAnswer(exchange, timeout_s)
        finally:
            exchange.abandon()

    async def _exchange(
        self,
        pool: Pool,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes,
        timeout_s: float,
        is_streamed: bool,
    ) -> Exchange:
        origin, authority, target = self._place(url)
        connections = self._pools.get((pool, origin)) or self._make(pool, origin)
        request = Request(method, origin.scheme, authority, target, headers, content)
        try:
            return await connections.exchange(request, timeout_s, is_streamed)
        except (Lost, Silent, OSError) as problem:
            raise _translated(problem, f"{method} {authority}") from None

    def _place(self, url: str) -> tuple[Origin, str, str]:
        """Where a URL leads. Few different ones are used, again and again; the others are not kept."""
        place = self._places.get(url)
        if place is None:
            try:
                parts = urlsplit(url)
                origin = Origin.of(url, settings.proxy_for(url, self._config))
                origin.host.encode("idna")
            except ValueError:  # base_url was looked at: this came from the service
                raise APIResponseValidationError(message="The service named an address that is none.") from None
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            place = origin, parts.netloc.rpartition("@")[2], target
            if len(self._places) < 256:
                self._places[url] = place
        return place

    def _make(self, pool: Pool, origin: Origin) -> ConnectionPool:
        if origin.scheme == "https" and self._tls is None:
            self._tls = tls_context(self._config.ca_file)
        made = self._pools[pool, origin] = ConnectionPool(origin, self.limit_of(pool), self._tls)
        return made

    def limit_of(self, pool: Pool) -> int:
        """How many connections of a kind may be open to one host."""
        return min(self._config.pools[pool.value], _most_connections())

    def _next_url(self, url: str, location: str | None) -> str:
        target = urljoin(url, location or "")
        if urlsplit(target)[:2] != self._base:
            raise APIResponseValidationError(
                message=f"{url} redirects to another host ({urlsplit(target).netloc}); the key is not sent there. "
                "If that is the service's new address, set it as base_url."
            )
        return target


def _most_connections() -> int:
    """A third of the files this process may open: two wide pools must leave some to the user's program."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 1 << 30
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // 3, 8) if soft != resource.RLIM_INFINITY else 1 << 30


def _whole(exchange: Exchange) -> Answer:
    content = exchange.content()
    encoding = exchange.headers.get("content-encoding")
    if encoding:  # we ask for none, but proxies have their own will
        try:
            content = decompress(content, encoding)
        except ValidationError as problem:
            raise APIResponseValidationError(message=f"The service's answer cannot be read: {problem}") from None
    return Answer(exchange.status, exchange.headers, content)


def _translated(problem: Exception, doing: str) -> APIConnectionError:
    text = str(problem) or type(problem).__name__
    if isinstance(problem, (Silent, ConnectTimeout, TimeoutError)):
        return APITimeoutError(None, f"No answer in time: {doing}: {text}.")
    if isinstance(problem, ssl.SSLCertVerificationError):
        error = APIConnectionError(
            None,
            f"The certificate of the service is not trusted ({problem.verify_message}). If it is signed by an "
            "authority of your own, name that authority's file as ca_file (TINKEX_CA_FILE).",
        )
        error.retryable = False
        return error
    return APIConnectionError(None, f"Connection error: {doing}: {text}.")


_transports: dict[Any, Transport] = {}
_lock = threading.Lock()


def transport_for(config: Config) -> Transport:
    """The pools of one (base URL, key): shared by all clients with the same pool settings."""
    proxies = (config.proxy, config.http_proxy, config.https_proxy, config.no_proxy)
    key = (*config.key, tuple(sorted(config.pools.items())), *proxies, config.ca_file)
    with _lock:
        if key not in _transports:
            _transports[key] = Transport(config)
        return _transports[key]


_parked: list[Any] = []


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    # Kept, not dropped: closing these sockets here would reach into the parent's event loop.
    _parked.append(dict(_transports))
    _transports.clear()


after_fork_in_child(_forget)
