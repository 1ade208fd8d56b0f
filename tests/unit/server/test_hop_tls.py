"""TLS between servers, over real sockets: which certificate of a node the hop accepts, and what it says of others."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.test_hops import head_of, on_a_loop, other_node, sent
from tinkex.clock import REAL
from tinkex.errors import ConfigError
from tinkex.server.cluster.hop import HopFailed, Hops, HopUntrusted
from tinkex.server.tls import certificates
from tinkex.server.tls.contexts import HANDSHAKE_S, client_context, server_context
from tinkex.settings import ServeConfig

HOST = "127.0.0.1"


def certs(folder: Path, *names: str, ca: Path | None = None) -> Path:
    """A folder with a CA and a certificate for the first name."""
    issuer = certificates.open_authority(ca or folder)
    folder.mkdir(exist_ok=True)
    certificates.issue(folder, issuer, names or (HOST,), days=30)
    return folder


def config(ca: Path, own: Path | None = None, name: str = HOST) -> ServeConfig:
    own = own or ca
    cert, key = own / f"{name}.crt", own / f"{name}.key"
    return ServeConfig(node_url="https://127.0.0.1:1", node_cert=cert, node_key=key, cluster_ca=ca / "ca.crt")


def hops(folder: Path) -> Hops:
    return Hops(REAL, client_context(config(folder)))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = await head_of(reader)
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        said = b"%d" % len(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(said) + said)


@contextlib.asynccontextmanager
async def node(own: Path, name: str = HOST) -> AsyncIterator[str]:
    """A server with the certificate of this name. Its address."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own / f"{name}.crt", own / f"{name}.key")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(connected, HOST, 0, ssl=context)
    try:
        yield f"https://{HOST}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@on_a_loop
async def test_a_node_with_a_certificate_of_the_clusters_ca_is_reached(tmp_path: Path) -> None:
    made = certs(tmp_path / "a")
    async with node(made) as url:
        sending = hops(made)
        assert await sent(sending, url) == (200, b"0")
        assert await sent(sending, url, bytes(5_000_000)) == (200, b"5000000")
        sending.close()


@on_a_loop
async def test_a_certificate_of_another_ca_is_refused_also_if_the_machine_trusts_it(tmp_path: Path) -> None:
    ours, theirs = certs(tmp_path / "a"), certs(tmp_path / "b")
    async with node(theirs) as url:
        sending = hops(ours)
        with pytest.raises(HopUntrusted, match="not from the cluster's CA"):
            await sent(sending, url)
        sending.close()
    assert len(client_context(config(ours)).get_ca_certs()) == 1, "the machine's authorities do not count"


@on_a_loop
async def test_an_expired_certificate_and_one_for_another_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, now = certs(tmp_path / "a", "10.1.2.3"), dt.datetime.now(dt.UTC)
    certs(tmp_path / "a", "node1.internal")
    monkeypatch.setattr(certificates, "_now", lambda: now - dt.timedelta(days=40))
    old = certs(tmp_path / "old", ca=tmp_path / "a")
    sending = hops(made)
    for folder, name, reason in (
        (old, HOST, "has expired"),
        (made, "10.1.2.3", "for another address"),
        (made, "node1.internal", "for another address"),
    ):
        async with node(folder, name) as url:
            with pytest.raises(HopUntrusted, match=reason):
                await sent(sending, url)
    async with node(certs(tmp_path / "c", ca=made), HOST) as url:
        with pytest.raises(HopUntrusted, match="for another name"):
            await sent(sending, url.replace(HOST, "localhost"))
    sending.close()


@on_a_loop
async def test_nothing_is_sent_without_tls_where_the_cluster_encrypts(tmp_path: Path) -> None:
    """Also not to a node that gives an http:// address, and a node without TLS at an https:// address gets nothing."""
    heads: list[bytes] = []

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.read(100))
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    sending = hops(certs(tmp_path / "a"))
    async with other_node(plain) as url:
        with pytest.raises(HopUntrusted, match="this cluster encrypts"):
            await sent(sending, url)
        assert heads == []
        with pytest.raises(HopUntrusted, match="does not speak TLS"):
            await sent(sending, url.replace("http://", "https://"))
        assert len(heads) == 1 and b"internal" not in heads[0], "a handshake came, and no request"
    sending.close()


@on_a_loop
async def test_a_plain_request_to_a_node_with_tls_fails(tmp_path: Path) -> None:
    made = certs(tmp_path / "a")
    async with node(made) as url:
        sending = Hops(REAL)
        with pytest.raises(HopFailed):
            await sent(sending, url.replace("https://", "http://"))
        sending.close()


def test_a_node_does_not_start_with_a_certificate_that_the_others_would_refuse(tmp_path: Path) -> None:
    ours, theirs = certs(tmp_path / "a"), certs(tmp_path / "b")
    certs(ours, "node1.internal")
    assert server_context(config(ours)) is not None and 0 < HANDSHAKE_S < 60
    with pytest.raises(ConfigError, match="not from the cluster's CA"):
        server_context(config(ours, theirs))
    with pytest.raises(ConfigError, match="for another address"):
        server_context(config(ours, name="node1.internal"))
    with pytest.raises(ConfigError, match="No such file"):
        server_context(config(ours, name="node2.internal"))
    (ours / "node1.internal.key").write_bytes((theirs / f"{HOST}.key").read_bytes())
    with pytest.raises(ConfigError, match="the key is of another certificate"):
        server_context(config(ours, name="node1.internal"))
    (ours / "node1.internal.key").write_text("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match="must be PEM files") as refused:
        server_context(config(ours, name="node1.internal"))
    assert "c2VjcmV0" not in str(refused.value)
    (ours / "ca.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match="holds no certificate"):
        server_context(config(ours))


def test_settings_of_tls_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    from tinkex.settings import check_cluster

    shared: dict[str, Any] = {"database_url": "postgresql://db/x", "cluster_secret": "s" * 32}
    for wrong, reason in (
        ({"node_url": "https://n", "node_cert": "a"}, "needs --node-key"),
        ({"node_url": "https://n", "node_key": "a"}, "needs --node-cert"),
        ({"node_url": "http://n", "node_cert": "a", "node_key": "b"}, "must begin with https://"),
        ({"node_url": "http://n", "cluster_ca": "a"}, "must begin with https://"),
        ({"no_engine": True, "node_cert": "a", "node_key": "b"}, "A front is reached by clients"),
        ({"cluster_ca": "a"}, "This one would serve without TLS"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_cluster(ServeConfig(**{**shared, **wrong}))
    check_cluster(ServeConfig(no_engine=True, cluster_ca=tmp_path, **shared))
    check_cluster(ServeConfig())
