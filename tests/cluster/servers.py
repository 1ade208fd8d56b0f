"""The cluster of one schedule: its fronts and nodes, and the links between them.

Every node has a data folder of its own, and reaches PostgreSQL through a link of its own. Other servers reach it
through another link, which is the address that it is known by.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from tests.cluster.buckets import ACCESS, Bucket
from tests.cluster.kinds import LEASE_S
from tests.cluster.links import Link, Links, Mode
from tests.cluster.schedule import ClusterSchedule
from tests.faults.databases import BreakablePostgres, PostgresSchema
from tests.faults.history import Recorder
from tests.faults.hooks import PASSES_ALONE
from tests.faults.proxy import Proxy
from tests.faults.supervisor import Disk, Supervisor
from tests.faults.tenant import key_of

SECRET = "0123456789abcdef" * 4
ALONE = {PASSES_ALONE: "yes"}
COUNTED = {
    "is at home on node": "runs that got a home",
    "a write about": "writes that the fence refused",
    "was given up: others": "nodes that found that they were given up",
    "the lease of this node cannot be renewed": "renewals that failed",
}
"""Words of the servers' logs, and what they show."""


@dataclass(frozen=True)
class Server:
    """A front or a node, and the links that it stands on."""

    supervisor: Supervisor
    database: Link
    door: Link | None
    """How other servers reach it; a front is reached by clients only."""


class Cluster:
    def __init__(
        self,
        schedule: ClusterSchedule,
        folder: Path,
        postgres: BreakablePostgres,
        buckets_port: int,
        recorder: Recorder,
        warmth: str,
        without: str,
        stack: ExitStack,
        *,
        delay_s: float = 0.0,
    ) -> None:
        """`delay_s` is how long what servers send to each other, to the database and to the bucket is under way."""
        self._folder, self._postgres, self._recorder = folder, postgres, recorder
        self._warmth, self._without, self._stack = warmth, without, stack
        self.clients: Proxy | None = None
        """What the clients reach the fronts through, once somebody has made it: its ports are those of the fronts."""
        name = f"cluster_{schedule.seed}"
        self.schema = PostgresSchema(postgres, name)
        stack.callback(self.schema.close)
        self.links = Links(delay_s)
        stack.callback(self.links.close)
        bucket = Bucket(buckets_port, f"seed-{schedule.seed}")
        stack.callback(bucket.close)
        self.bucket_link = self.links.add(buckets_port)
        self._environment = {
            **ACCESS,
            **ALONE,
            "AWS_ENDPOINT_URL": self.bucket_link.url,
            "TINKEX_CLUSTER_SECRET": SECRET,
        }
        self._flags = ["--node-lease-s", str(LEASE_S), "--blobs", bucket.url]
        self._flags += [word for tenant in schedule.programs for word in ("--api-key", key_of(tenant))]
        self._node_flags = ["--snapshot-every-s", str(schedule.snapshot_every_s)]
        self.fronts = [self._start(f"front {number + 1}", is_front=True) for number in range(schedule.fronts)]
        self.nodes = [self._start(f"node {number + 1}", is_front=False) for number in range(schedule.nodes)]

    def _start(self, name: str, *, is_front: bool) -> Server:
        database = self.links.add(self._postgres.folder / ".s.PGSQL.5432")
        disk = Disk(self._folder / name.replace(" ", "-"))
        self._stack.callback(disk.close)
        supervisor = Supervisor(
            self._folder,
            self.schema,
            disk,
            self._recorder,
            flags=[*self._flags, *((["--no-engine"]) if is_front else self._node_flags)],
            warmth=self._warmth,
            without=self._without,
            name=name,
            has_engine=not is_front,
            environment={**self._environment, "TINKEX_DATABASE_URL": self._url_through(database)},
        )
        self._stack.callback(supervisor.kill_all)
        door = None
        if not is_front:
            door = self.links.add(supervisor.port)
            supervisor.set_flags("--node-url", door.url)
        supervisor.start()
        return Server(supervisor, database, door)

    def _url_through(self, link: Link) -> str:
        schema = quote(self.schema.url.rpartition("search_path%3D")[2])
        return f"postgresql://postgres@127.0.0.1:{link.port}/postgres?options=-csearch_path%3D{schema}"

    @property
    def servers(self) -> list[Server]:
        return [*self.fronts, *self.nodes]

    @property
    def supervisors(self) -> list[Supervisor]:
        return [server.supervisor for server in self.servers]

    def wait(self) -> None:
        for supervisor in self.supervisors:
            supervisor.wait_until_ready()

    def heal(self) -> None:
        """Undo whatever a failed fault may have left behind."""
        self.links.heal()
        for supervisor in self.supervisors:
            supervisor.heal()

    def counts(self) -> dict[str, int]:
        logs = [supervisor.log() for supervisor in self.supervisors]
        return {name: sum(log.count(words) for log in logs) for words, name in COUNTED.items()}

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.schema.url) as connection:
            return connection.execute(query, values).fetchall()

    @contextmanager
    def broken(self, mode: Mode, *links: Link | None) -> Iterator[None]:
        """Keep links in a mode for the block."""
        for link in links:
            if link is not None:
                link.set(mode)
        try:
            yield
        finally:
            for link in links:
                if link is not None:
                    link.set("open")
