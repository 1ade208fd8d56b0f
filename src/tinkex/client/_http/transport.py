"""Sends requests over pools of connections, one for each kind of traffic: a burst of samples delays no heartbeat.

HTTP/1.1, or HTTP/2 where TLS negotiates it. Redirects are followed only within the same origin: a key never travels to
another host.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

from tinkex import settings
from tinkex.client._http.dial import Origin, tls_context
from tinkex.client._http.exchange import (
    ERROR_BYTES,
    ConnectionLost,
    Exchange,
    HTTPRequest,
    ReadTimeout,
    ResponseTooLarge,
)
from tinkex.client._http.pool import ConnectionPool, ConnectTimeout
from tinkex.client._runtime.fork import ProcessRegistry
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APITimeoutError,
    ValidationError,
)
from tinkex.settings import Config
from tinkex.wire.body import decompress
from tinkex.wire.endpoints import Pool

REDIRECTS = 5
MAX_RATIO = 200
"""Times that a response may expand when it is decompressed. Text expands 5 to 20 times."""
FREE_BYTES = 64 << 20
"""Responses may expand to this size whatever their own."""
T = TypeVar("T")
Headers = Mapping[str, str]
"""A response's headers, under lower-case names."""


class RequestTarget(NamedTuple):
    """Where a URL leads: the connection's origin, the `host` header, the path with its query."""

    origin: Origin
    authority: str
    path: str


class HTTPResponse(NamedTuple):
    """A whole response of any status."""

    status: int
    headers: Headers
    content: bytes


class StreamedResponse:
    """A response whose body is read chunk by chunk. `close` it, however it ended."""

    def __init__(self, exchange: Exchange, timeout_s: float) -> None:
        self.status = exchange.status
        self.headers: Headers = exchange.headers
        self.received_bytes = 0
        self.on_close: Callable[[], None] | None = None
        """Called once, when the response is closed."""
        self._exchange = exchange
        self._timeout_s = timeout_s

    async def wait_for_body(self) -> None:
        """Return when the first byte of the body is here: until then a request may be sent again."""
        await self._in_time(self._exchange.wait_for_piece())

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Silence longer than the timeout is an error."""
        while chunk := await self._in_time(self._exchange.next_piece()):
            self.received_bytes += len(chunk)
            yield chunk

    async def read(self) -> HTTPResponse:
        """Return the response with the whole body, which is that of an error."""
        content = bytearray()
        async for chunk in self.chunks():
            content += chunk
            if len(content) > ERROR_BYTES:
                raise _translated(ResponseTooLarge(f"its body has more than {ERROR_BYTES:,} bytes"), "reading an error")
        return HTTPResponse(self.status, self.headers, bytes(content))

    def close(self) -> None:
        """End the exchange if it has not ended. Closing twice is harmless."""
        self._exchange.abandon()
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except (ConnectionLost, ReadTimeout, OSError) as error:
            raise _translated(error, "reading the response") from None


class Transport:
    """Pools towards one service, and towards the hosts its download addresses name. Loop thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tls: ssl.SSLContext | None = None
        self._pools: dict[tuple[Pool, Origin], ConnectionPool] = {}
        self._targets: dict[str, RequestTarget] = {}
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
    ) -> HTTPResponse:
        """Send, and return the whole response, whatever its status.

        Raises APIConnectionError or APITimeoutError; APIResponseValidationError for a response that is too large.
        """
        for _ in range(REDIRECTS):
            exchange = await self._exchange(pool, method, url, headers, content, timeout_s, False)
            if not (follow and exchange.status in (301, 302, 303, 307, 308)):
                return await self._whole(exchange)
            url = self._next_url(url, exchange.headers.get("location"))
        raise APIResponseValidationError(message=f"{method} {url}: more than {REDIRECTS} redirects.")

    async def open(
        self, pool: Pool, method: str, url: str, headers: Mapping[str, str], content: bytes, timeout_s: float
    ) -> StreamedResponse:
        """Send, and return the response when its headers are here. Redirects are not followed."""
        return StreamedResponse(await self._exchange(pool, method, url, headers, content, timeout_s, True), timeout_s)

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
        origin, authority, path = self._target(url)
        connections = self._pools.get((pool, origin)) or self._make(pool, origin)
        request = HTTPRequest(method, origin.scheme, authority, path, headers, content)
        try:
            return await connections.exchange(request, timeout_s, is_streamed)
        except (ConnectionLost, ReadTimeout, ResponseTooLarge, OSError) as error:
            raise _translated(error, f"{method} {authority}") from None

    async def _whole(self, exchange: Exchange) -> HTTPResponse:
        content = exchange.content()
        encoding = exchange.headers.get("content-encoding")
        if encoding:  # we ask for none, but some proxies compress all the same
            limit_bytes = min(self._config.max_response_bytes, max(FREE_BYTES, MAX_RATIO * len(content)))
            unfold = functools.partial(decompress, content, encoding, limit_bytes)
            try:
                # A few bytes can take a second: not on the loop.
                content = await asyncio.get_running_loop().run_in_executor(None, unfold)
            except ValidationError as error:
                raise APIResponseValidationError(message=f"The service's response cannot be read: {error}") from None
        return HTTPResponse(exchange.status, exchange.headers, content)

    def _target(self, url: str) -> RequestTarget:
        """Return where a URL leads. A few URLs are used again and again: those are remembered."""
        target = self._targets.get(url)
        if target is None:
            try:
                parts = urlsplit(url)
                origin = Origin.of(url, settings.proxy_for(url, self._config))
                origin.host.encode("idna")
            except ValueError:  # base_url was checked before: this one came from the service
                raise APIResponseValidationError(message="The service named an address that is not a URL.") from None
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            target = RequestTarget(origin, parts.netloc.rpartition("@")[2], path)
            if len(self._targets) < 256:
                self._targets[url] = target
        return target

    def _make(self, pool: Pool, origin: Origin) -> ConnectionPool:
        if origin.scheme == "https" and self._tls is None:
            self._tls = tls_context(self._config.ca_file)
        limit_bytes = self._config.max_response_bytes
        connections = self._pools[pool, origin] = ConnectionPool(origin, self.limit_of(pool), self._tls, limit_bytes)
        return connections

    def limit_of(self, pool: Pool) -> int:
        """Return how many connections of a kind may be open to one host."""
        return min(self._config.pools[pool.value], _max_connections())

    def _next_url(self, url: str, location: str | None) -> str:
        try:
            target = urljoin(url, location or "")
            is_same_host = urlsplit(target)[:2] == self._base
        except ValueError:
            raise APIResponseValidationError(
                message=f"{url} redirects to {location!r:.200}, which is no URL."
            ) from None
        if not is_same_host:
            raise APIResponseValidationError(
                message=f"{url} redirects to another host ({urlsplit(target).netloc}); the key is not sent there. "
                "If that is the service's new address, set it as base_url."
            )
        return target


def _max_connections() -> int:
    """Return a third of the files this process may open: two wide pools must leave some to the user's program."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 1 << 30
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // 3, 8) if soft != resource.RLIM_INFINITY else 1 << 30


def _translated(error: Exception, doing: str) -> APIError:
    """Return the public error for a failure of the connection."""
    text = str(error) or type(error).__name__
    if isinstance(error, ResponseTooLarge):
        return APIResponseValidationError(
            message=f"The response is too large: {doing}: {text}. If the service is right to send so much, raise "
            "max_response_bytes."
        )
    if isinstance(error, (ReadTimeout, ConnectTimeout, TimeoutError)):
        return APITimeoutError(None, f"No response in time: {doing}: {text}.")
    if isinstance(error, ssl.SSLCertVerificationError):
        untrusted = APIConnectionError(
            None,
            f"The certificate of the service is not trusted ({error.verify_message}). If it is signed by an "
            "authority of your own, name that authority's file as ca_file (TINKEX_CA_FILE).",
        )
        untrusted.retryable = False
        return untrusted
    return APIConnectionError(None, f"Connection error: {doing}: {text}.")


_transports: ProcessRegistry[tuple[Any, ...], Transport] = ProcessRegistry()


def transport_for(config: Config) -> Transport:
    """Return the pools of one (base URL, key): shared by all clients with the same pool settings."""
    proxies = (config.proxy, config.http_proxy, config.https_proxy, config.no_proxy)
    key = (*config.key, tuple(sorted(config.pools.items())), *proxies, config.ca_file, config.max_response_bytes)
    return _transports.get(key, lambda: Transport(config))
