"""The cluster of one schedule: its fronts and nodes, the links between them, and what each kind of fault does to it.

Every node has a data folder of its own, and reaches PostgreSQL through a link of its own. Other servers reach it
through another link, which is the address that it is known by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from tests.cluster.buckets import ACCESS, Bucket
from tests.cluster.kinds import KINDS, LEASE_S
from tests.cluster.links import Link, Links, Mode
from tests.cluster.schedule import ClusterFault, ClusterSchedule
from tests.faults.databases import BreakablePostgres, PostgresSchema
from tests.faults.history import Recorder
from tests.faults.hooks import PASSES_ALONE
from tests.faults.schedule import HeavyFault, HeavyKind
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

    def strike(self, fault: ClusterFault) -> str:
        """Break something, undo it after its time, and return a note for the record."""
        for supervisor in self.supervisors:
            supervisor.check_alive()
        return STRIKES[fault.kind](self, fault) or ""

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
    def broken(self, mode: Mode, *links: Link | None) -> Any:
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


# ── What each kind does

Strike = Callable[[Cluster, ClusterFault], str | None]


def _heavy(kind: HeavyKind) -> Callable[[Supervisor, ClusterFault], str]:
    """Return what breaks one server as in the schedules of a single one."""
    return lambda supervisor, fault: supervisor.commit(
        HeavyFault(kind=kind, at=fault.at, delay_s=0.0, seconds=fault.seconds)
    )


def _on_front(act: Callable[[Supervisor, ClusterFault], str]) -> Strike:
    return lambda cluster, fault: act(cluster.fronts[fault.server].supervisor, fault)


def _on_node(act: Callable[[Supervisor, ClusterFault], str]) -> Strike:
    return lambda cluster, fault: act(cluster.nodes[fault.server].supervisor, fault)


def _on_links(mode: Mode, links_of: Callable[[Cluster, ClusterFault], tuple[Link | None, ...]]) -> Strike:
    def strike(cluster: Cluster, fault: ClusterFault) -> str:
        with cluster.broken(mode, *links_of(cluster, fault)):
            threading.Event().wait(fault.seconds)
        return ""

    return strike


def _database(cluster: Cluster, fault: ClusterFault) -> tuple[Link]:
    return (cluster.nodes[fault.server].database,)


def _door(cluster: Cluster, fault: ClusterFault) -> tuple[Link | None]:
    return (cluster.nodes[fault.server].door,)


def _lose_heir(cluster: Cluster, fault: ClusterFault) -> str:
    """Freeze a node, wake it, and kill the others: the runs come back to it, which has an old state of them."""
    cluster.nodes[fault.server].supervisor.pause(fault.seconds, with_engine=False)
    threading.Event().wait(fault.amount)
    heirs = [node.supervisor for number, node in enumerate(cluster.nodes) if number != fault.server]
    for heir in heirs:
        heir.kill_all()
    # Until their leases are over: a new process would be a node without runs, and get them.
    threading.Event().wait(2 * LEASE_S)
    for heir in heirs:
        heir.start()
    return ""


STRIKES: dict[str, Strike] = {
    "kill front": _on_front(_heavy("kill server")),
    "restart front": _on_front(_heavy("restart server")),
    "kill node": _on_node(_heavy("kill server")),
    "kill engine": _on_node(_heavy("kill engine")),
    "restart node": _on_node(_heavy("restart server")),
    "freeze node": _on_node(lambda supervisor, fault: supervisor.pause(fault.seconds, with_engine=False)),
    "freeze machine": _on_node(lambda supervisor, fault: supervisor.pause(fault.seconds, with_engine=True)),
    "freeze node, then lose its heir": _lose_heir,
    "pause node": _on_node(lambda supervisor, fault: supervisor.pause(fault.seconds, with_engine=False)),
    "cut from database": _on_links("cut", _database),
    "silence from database": _on_links("silent", _database),
    "blink of database": _on_links("cut", _database),
    "cut between nodes": _on_links("cut", _door),
    "silence between nodes": _on_links("silent", _door),
    "isolate node": _on_links("silent", lambda cluster, fault: (*_database(cluster, fault), *_door(cluster, fault))),
    "front cut from database": _on_links("cut", lambda cluster, fault: (cluster.fronts[fault.server].database,)),
    "restart database": lambda cluster, fault: cluster.schema.restart(fault.seconds),
    "lose database": lambda cluster, fault: cluster.schema.lose(fault.seconds),
    "stop database": lambda cluster, fault: cluster.schema.stop(fault.seconds),
    "bucket away": _on_links("cut", lambda cluster, fault: (cluster.bucket_link,)),
    "bucket silent": _on_links("silent", lambda cluster, fault: (cluster.bucket_link,)),
    "skew clock": _on_node(lambda supervisor, fault: supervisor.skew_clock(fault.amount) or ""),
}
assert set(STRIKES) == {kind.name for kind in KINDS}
