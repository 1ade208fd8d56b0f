"""A cluster with TLS between its servers: who is trusted, what a trace looks like, and that no secret is to be seen."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.integration.service.cluster import PASSWORD, SECRET, Cluster, Node
from tests.integration.service.raw import Raw, batch
from tests.unit.store.postgres import PostgresServer
from tinkex.server.tls import certificates

pytestmark = pytest.mark.slow
HOST = "127.0.0.1"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def certs(folder: Path) -> Path:
    certificates.issue(folder, certificates.open_authority(folder), (HOST,), days=2)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node with a certificate, one front that trusts its authority."""
    postgres, folder = PostgresServer(), tmp_path_factory.mktemp("tls")
    cluster = Cluster(postgres, folder, certs(folder / "certs"))
    cluster.node("--log-level", "debug")
    cluster.front("--log-level", "debug")
    cluster.wait()
    yield cluster
    cluster.stop()
    postgres.stop()


def servers(cluster: Cluster) -> tuple[Node, Node]:
    node, front = cluster.servers
    return node, front


def test_a_front_reaches_a_node_with_tls_and_both_log_the_clients_trace(cluster: Cluster) -> None:
    node, front = servers(cluster)
    run = Raw(front).run(rank=2)
    assert run.done("forward", forward_input=batch())["metrics"]["loss:sum"] > 0
    body = run.named(adam_params={"learning_rate": 0.01})
    sent = run.client.post("optim_step", body, headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
    assert sent.status == 200 and run.client.poll(sent.json["request_id"]).status == 200
    assert f"handed to {node.url} [trace {TRACE}]" in front.log()
    assert f"POST /api/v1/optim_step came in [trace {TRACE}]" in node.log()
    assert front.log().count(TRACE) == 2 and node.log().count(TRACE) == 1


def test_small_requests_share_one_connection_to_the_node(cluster: Cluster) -> None:
    """Each had a connection, and a handshake, of its own where the front reads no body: `get_info`, heartbeats."""
    node, front = servers(cluster)
    run = Raw(front).run(rank=2)
    for _ in range(20):
        assert Raw(front).post("get_info", {"model_id": run.id}).status == 200
    # Fields of the kernel's table: number, local address, remote address, state (01: established).
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert 1 <= sum(row[2].endswith(f":{node.port:04X}") and row[3] == "01" for row in rows) <= 3


def test_a_plain_request_to_the_port_of_a_node_gets_nothing(cluster: Cluster) -> None:
    node, _ = servers(cluster)
    connection = http.client.HTTPConnection(HOST, node.port, timeout=10)
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.request("GET", "/api/v1/healthz")
        connection.getresponse()
    connection.close()
    assert node.is_ready()


def test_a_node_of_another_authority_gets_no_request_and_the_client_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """It has the database and is in its list of nodes: only its certificate is wrong."""
    _, front = servers(cluster)
    folder = certs(tmp_path / "theirs")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / f"{HOST}.crt", folder / f"{HOST}.key")
    loop, received = asyncio.new_event_loop(), list[bytes]()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(100))
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(receive, HOST, 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    url = f"https://{HOST}:{server.sockets[0].getsockname()[1]}"
    row = (
        "INSERT INTO nodes (id, url, kind, models, load, version, is_draining, until) VALUES (%s, %s, 'train', %s, 0, "
    )
    try:
        Raw(front).run(rank=2)  # so that the stranger has fewer runs than the node, and gets the next one
        with psycopg.connect(cluster.url) as connection:
            connection.execute(
                f"{row} '', false, extract(epoch from now()) + 60)", ("0" * 16, url, json.dumps(["tinkex/tiny"]))
            )
        session = Raw(front).post("create_session", {"tags": [], "sdk_version": "0"}).json["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tinkex/tiny", "lora_config": {"rank": 2}}
        rejected = Raw(front).post("create_model", body)
    finally:
        with psycopg.connect(cluster.url) as connection:
            connection.execute("DELETE FROM nodes WHERE id = %s", ("0" * 16,))
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
    assert rejected.status == 503 and "retry-after" in rejected.headers
    assert f"{url}, is not trusted: its certificate is not from the cluster's CA" in rejected.text
    assert f"no request is handed to {url}: its certificate is not from the cluster's CA" in front.log()
    assert not any(received)


def test_no_secret_is_on_a_command_line_or_in_a_log(cluster: Cluster) -> None:
    node, front = servers(cluster)
    assert cluster.certs is not None
    keys = [line for file in cluster.certs.glob("*.key") for line in file.read_text().splitlines()[1:-1]]
    secrets = [SECRET, PASSWORD, *keys]
    pids = [server.process.pid for server in (node, front) if server.process] + [node.engine_pid()]
    shown = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    assert len(shown) == 3 and all("python" in line for line in shown)
    shown += [node.log(), front.log()]
    assert not [secret for secret in secrets for text in shown if secret in text]


def test_errors_name_the_file_and_not_what_is_in_it(cluster: Cluster, tmp_path: Path) -> None:
    """A database that does not let us in, a secret that is too short: the sentence is for a log that many read."""
    assert cluster.certs is not None
    url, secret = tmp_path / "url", tmp_path / "secret"
    url.write_text(f"postgresql://tinkex:{PASSWORD}@127.0.0.1:1/tinkex?connect_timeout=1")
    secret.write_text(SECRET[:20])

    def serve(*words: str) -> str:
        command = [sys.executable, "-m", "tinkex", *words, "--data-dir", str(tmp_path / "data")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout + done.stderr

    front = ("serve", "--no-engine", "--port", "0")
    told = [
        serve("cluster", "status", "--database-url-file", str(url)),
        serve(*front, "--database-url-file", str(url), "--cluster-secret-file", str(secret)),
    ]
    assert "127.0.0.1" in told[0] and "secret file" in told[1], told
    assert not any(PASSWORD in text or SECRET[:20] in text for text in told)
