"""Real servers on one PostgreSQL: nodes with an engine, and fronts without."""

from __future__ import annotations

import ssl
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Raw, batch, datum, text
from tests.unit.store.postgres import PostgresServer

LEASE_S = 3.0
STEP = {"learning_rate": 0.01}
SECRET = "0123456789abcdef" * 4
PASSWORD = "a-password-of-the-database"


class Node(LiveServer):
    """A server of the cluster. Without a bucket they share a data folder. Each has a log of its own."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *flags: str,
        is_front: bool = False,
        models: tuple[str, ...] | None = None,
    ) -> None:
        folder = cluster.folder / (name if is_front or "--blobs" in flags else "shared")
        models = () if is_front else models or cluster.models
        common = ("--database-url-file", str(cluster.url_file), "--cluster-secret-file", str(cluster.secret_file))
        super().__init__(folder, *common, "--node-lease-s", str(LEASE_S), *flags, models=models)
        if cluster.certs is not None:
            self._words += ["--cluster-ca", str(cluster.certs / "ca.crt")]
        if cluster.certs is not None and not is_front:
            self.url = self.url.replace("http://", "https://")
            self._words += ["--node-cert", str(cluster.certs / "127.0.0.1.crt")]
            self._words += ["--node-key", str(cluster.certs / "127.0.0.1.key")]
            self.tls = ssl.create_default_context(cafile=cluster.certs / "ca.crt")
        self._words += ["--no-engine"] if is_front else ["--node-url", self.url]
        self._log = cluster.folder / f"{name}.log"


class Cluster:
    """A schema of a PostgreSQL, and the servers that share it; with TLS between them if there are certificates."""

    models: tuple[str, ...] = ("tinkex/tiny",)

    def __init__(self, postgres: PostgresServer, folder: Path, certs: Path | None = None) -> None:
        self.certs = certs
        self.folder, name = folder, f"cluster_{abs(hash(folder)) % 10**9}"
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {quote(name)}")
        # The password is there to be looked for: this PostgreSQL asks for none.
        self.url = postgres.url(name).replace("postgres@", f"postgres:{PASSWORD}@")
        self.url_file, self.secret_file = folder / "url", folder / "secret"
        self.url_file.write_text(f"{self.url}\n")
        self.secret_file.write_text(f"{SECRET}\n")
        self.servers: list[Node] = []

    def node(self, *flags: str, models: tuple[str, ...] | None = None) -> Node:
        return self._add(Node(self, f"node{len(self.servers)}", *flags, models=models))

    def front(self, *flags: str) -> Node:
        return self._add(Node(self, f"front{len(self.servers)}", *flags, is_front=True))

    def _add(self, server: Node) -> Node:
        self.servers.append(server)
        server.start(wait_s=0)
        return server

    def wait(self) -> None:
        for server in self.servers:
            server.wait_until_ready()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(query, values).fetchall()

    def home_of(self, run_id: str) -> Node:
        [(url,)] = self.rows("SELECT n.url FROM homes h JOIN nodes n ON n.id = h.node WHERE h.run_id = %s", run_id)
        return next(server for server in self.servers if server.url == url)

    def logs(self) -> str:
        return "\n".join(f"── {server._log.name}\n{server.log()[-4000:]}" for server in self.servers)

    def stop(self) -> None:
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                server.process.kill()
                server.process.wait(10)


def losses(clients: list[Raw], steps: int = 6) -> list[float]:
    """Train with every request to the next server in turn; the loss of each step."""
    turns = cycle(clients)
    run = clients[0].run()
    found = []
    for number in range(steps):
        data = [datum(text([10 + number, 20, 30]))]
        for call, fields in (
            ("forward_backward", {"forward_backward_input": batch(data)}),
            ("optim_step", {"adam_params": STEP}),
        ):
            submitted = next(turns).post(call, run.named(**fields))
            assert submitted.status == 200, submitted.content
            done = next(turns).poll(submitted.json["request_id"])
            assert done.status == 200 and "error" not in done.json, done.content
            if call == "forward_backward":
                found.append(done.json["metrics"]["loss:sum"])
    return found
