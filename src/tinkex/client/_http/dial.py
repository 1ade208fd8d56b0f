"""Opens connections: TCP, TLS with the CA the user trusts, through a proxy if there is one; ALPN chooses the HTTP."""

from __future__ import annotations

import asyncio
import base64
import ssl
from typing import NamedTuple, cast
from urllib.parse import unquote, urlsplit

from tinkex.client._http.exchange import Connection
from tinkex.client._http.http1 import Http1
from tinkex.errors import ConfigError

PROXY_RESPONSE_BYTES = 1 << 16


class Origin(NamedTuple):
    """Where a connection leads, and through which proxy."""

    scheme: str
    host: str
    port: int
    proxy: str | None = None

    @classmethod
    def of(cls, url: str, proxy: str | None = None) -> Origin:
        parts = urlsplit(url)
        return cls(parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), proxy)


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that trusts the system's certificates (OpenSSL itself obeys SSL_CERT_FILE) and `ca_file`."""
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ca_file {ca_file} cannot be used: {error}.") from None
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


async def dial(origin: Origin, context: ssl.SSLContext | None) -> Connection:
    """Return a connection that is ready for requests. Raises OSError (ssl.SSLError among them)."""
    loop = asyncio.get_running_loop()
    tls = context if origin.scheme == "https" else None
    if origin.proxy is None:
        _, chooser = await loop.create_connection(
            lambda: ProtocolChooser(loop), origin.host, origin.port, ssl=tls, happy_eyeballs_delay=0.25
        )
        return await chooser.chosen()
    proxy = urlsplit(origin.proxy)
    if proxy.scheme not in ("http", "") or not proxy.hostname:
        raise ConfigError(f"The proxy {proxy.scheme}://{proxy.hostname} is not supported: use an http:// proxy.")
    port = proxy.port or 80
    authorization = None
    if proxy.username is not None:
        credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        authorization = "Basic " + base64.b64encode(credentials.encode()).decode()
    if tls is None:
        _, protocol = await loop.create_connection(
            lambda: Http1(loop, authorization, via_proxy=True), proxy.hostname, port
        )
        return protocol
    return await _tunnel(loop, origin, proxy.hostname, port, authorization, tls)


class ProtocolChooser(asyncio.Protocol):
    """Waits for the handshake, then hands the connection to the protocol that both sides speak."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._chosen: Connection | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            from tinkex.client._http.http2 import Http2

            self._chosen = Http2(self._loop)
        else:
            self._chosen = Http1(self._loop)
        cast(asyncio.Transport, transport).set_protocol(self._chosen)
        self._chosen.connection_made(transport)

    async def chosen(self) -> Connection:
        assert self._chosen is not None
        if self._chosen.settled is not None:
            try:
                # A round trip at most, once per connection: a burst must not start more than the service takes.
                await self._chosen.settled
            except BaseException:
                self._chosen.close()
                raise
        return self._chosen


class ProxyTunnel(asyncio.Protocol):
    """Reads a proxy's response to CONNECT."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.response: asyncio.Future[bytes] = loop.create_future()
        self._read = b""

    def data_received(self, data: bytes) -> None:
        self._read += data
        if b"\r\n\r\n" in self._read and not self.response.done():
            self.response.set_result(self._read)
        elif len(self._read) > PROXY_RESPONSE_BYTES and not self.response.done():
            self.response.set_exception(OSError("the proxy's response does not end"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.response.done():
            self.response.set_exception(error or OSError("the proxy closed the connection"))


async def _tunnel(
    loop: asyncio.AbstractEventLoop,
    origin: Origin,
    host: str,
    port: int,
    authorization: str | None,
    tls: ssl.SSLContext,
) -> Connection:
    transport, tunnel = await loop.create_connection(lambda: ProxyTunnel(loop), host, port)
    target = f"[{origin.host}]:{origin.port}" if ":" in origin.host else f"{origin.host}:{origin.port}"
    extra = f"proxy-authorization: {authorization}\r\n" if authorization else ""
    transport.write(f"CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n{extra}\r\n".encode("latin-1"))
    try:
        response = await tunnel.response
        status = response.split(b"\r\n", 1)[0].split(b" ", 2)
        if len(status) < 2 or not status[1].startswith(b"2"):
            raise OSError(f"the proxy rejected it: {response[:80].decode('latin-1').splitlines()[0]}")
        chooser = ProtocolChooser(loop)
        upgraded = await loop.start_tls(transport, chooser, tls, server_hostname=origin.host)
        if upgraded is None:
            raise OSError("the connection was lost while TLS was negotiated")
        # start_tls does not call connection_made on the new protocol.
        chooser.connection_made(upgraded)
        return await chooser.chosen()
    except BaseException:
        transport.abort()
        raise
