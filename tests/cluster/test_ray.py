"""`tinkex cluster up` on a real Ray cluster of three machines: what Ray starts, what goes on when something dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psycopg
import pytest

from tests import tools
from tests.cluster.network import Network, can_make
from tests.cluster.processes import marked
from tests.cluster.ray_machines import LEASE_S, RayMachines, TinkexOnRay
from tests.cluster.training import PAUSE_S, Trainer
from tests.integration.service.live import LiveServer
from tests.unit.store.bucket_server import ACCESS, BucketServer
from tests.unit.store.postgres import PostgresServer

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not can_make(), reason="needs root and `ip`, for network namespaces"),
    pytest.mark.skipif(not tools.is_made("ray"), reason="needs Ray: `make prepare-cluster`"),
]
STEPS = 60
WITHOUT_HEAD_S = 75.0
"""Longer than the minute after which Ray's machines end, unless they are told otherwise, when their head is gone."""


class OnRay(NamedTuple):
    machines: RayMachines
    tinkex: TinkexOnRay
    network: Network
    database: str
    key: str

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database) as connection:
            return connection.execute(query, values).fetchall()

    def home_of(self, run_id: str) -> str:
        """The address of the node that works on a run."""
        query = "SELECT n.url FROM homes h JOIN nodes n ON n.id = h.node WHERE h.run_id = %s"
        [(url,)] = self.rows(query, run_id)
        return str(url)

    def living(self) -> list[str]:
        rows = self.rows("SELECT url FROM nodes WHERE until > extract(epoch FROM clock_timestamp()) ORDER BY url")
        return [url for (url,) in rows]

    def train(self, url: str, pause_s: float = PAUSE_S) -> Trainer:
        prefix = self.network.prefix(self.network.hub_address)
        return Trainer(url, STEPS, self.key, prefix=prefix, pause_s=pause_s)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def on_ray(postgres: PostgresServer, tmp_path: Path) -> Iterator[Callable[[int], OnRay]]:
    """Starts three machines with so many CPUs each, a database, a bucket, and a key for clients."""
    network = Network(4)
    started: list[RayMachines] = []
    with network.inside_hub():
        bucket = BucketServer(network.hub_address)
    try:

        def start(cpus: int) -> OnRay:
            machines = RayMachines(network, cpus)
            started.append(machines)
            machines.start()
            name = f"ray_{abs(hash(tmp_path)) % 10**9}"
            with psycopg.connect(postgres.url(), autocommit=True) as connection:
                connection.execute(f"CREATE SCHEMA {name}")
            database, key = postgres.url(name), _key(postgres.url(name), tmp_path)
            with network.inside_hub():
                place = bucket.new_url()
            fleet = TinkexOnRay(machines, database, place, bucket.environ, tmp_path / "data")
            return OnRay(machines, fleet, network, database, key)

        yield start
    finally:
        for machines in started:
            machines.stop()
        bucket.stop()
        network.remove()


def _key(database: str, folder: Path) -> str:
    words = [sys.executable, "-m", "tinkex", "-o", "json", "key", "create", "ann", "--data-dir", str(folder / "keys")]
    environ = {**os.environ, "TINKEX_DATABASE_URL": database}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return str(json.loads(done.stdout)["key"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one server with one thread makes of the same steps."""
    with LiveServer(tmp_path_factory.mktemp("alone") / "data", "--threads", "1") as server:
        return Trainer(server.url, STEPS, "tml-test-alone").digests()


def host_of(url: str) -> str:
    return str(urlsplit(url).hostname)


def until(condition: Callable[[], bool], seconds: float, about: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, about()
        time.sleep(0.1)


@pytest.mark.timing
@pytest.mark.parametrize("victim", ["raylet", "machine"])
def test_runs_go_on_when_a_machine_of_ray_dies(
    victim: str, on_ray: Callable[[int], OnRay], undisturbed: dict[str, str]
) -> None:
    """Its raylet alone, with which Ray's workers there end; or everything at once, as in a power cut.

    Ray starts the node again on the other machine. No data folder is shared.
    """
    cluster = on_ray(2)
    code, servers, said = cluster.tinkex.up("2xCPU:1")
    assert code == 0, said + cluster.machines.logs()
    nodes = [servers["train-0"]["url"], servers["train-1"]["url"]]
    assert len({host_of(url) for url in nodes}) == 2, "one on each machine"
    front = servers["front-0"]["url"]
    trainer = cluster.train(front)
    home = cluster.home_of(trainer.run_id)
    if host_of(home) == host_of(front):
        [other] = [url for url in nodes if url != home]
        moved = cluster.tinkex.cluster("move", trainer.run_id, other)
        assert moved.returncode == 0, moved.stderr
        home = cluster.home_of(trainer.run_id)
        assert home == other
    trainer.skip_to_now()
    trainer.wait_for_step(trainer.steps_done)
    (cluster.machines.kill_raylet if victim == "raylet" else cluster.machines.kill_machine)(host_of(home))
    began = time.monotonic()
    trainer.skip_to_now()
    assert trainer.steps_done < STEPS - 5, "it was still training"
    # The step under way may have been done and its result on its way: the one after it was submitted later.
    went_on = trainer.wait_for_step(trainer.steps_done + 1) - began
    print(f"{victim} killed: the run went on after {went_on:.1f} s (lease {LEASE_S:g} s)")
    assert went_on <= LEASE_S + 15
    assert trainer.digests() == undisturbed, cluster.machines.logs()
    assert cluster.home_of(trainer.run_id) != home
    until(lambda: len(cluster.living()) == 2, 120, lambda: cluster.machines.status() + cluster.machines.logs())
    print(f"{victim} killed: Ray had started the node again after {time.monotonic() - began:.1f} s")
    assert {host_of(url) for url in cluster.living()} == {host_of(url) for url in nodes} - {host_of(home)}
    assert cluster.train(front).digests() == undisturbed


@pytest.mark.timing
def test_nothing_happens_when_the_head_of_ray_dies(on_ray: Callable[[int], OnRay], undisturbed: dict[str, str]) -> None:
    cluster = on_ray(2)
    code, servers, said = cluster.tinkex.up("2xCPU:1")
    assert code == 0, said + cluster.machines.logs()
    head = cluster.machines.head
    front = next(row["url"] for name, row in servers.items() if host_of(row["url"]) != head and "front" in name)
    nodes = cluster.living()
    trainer = cluster.train(front)
    trainer.wait_for_step(3)
    cluster.machines.kill_machine(head)
    began = time.monotonic()
    trainer.skip_to_now()
    slowest = 0.0
    while trainer.steps_done < STEPS:
        before = time.monotonic()
        slowest = max(slowest, trainer.wait_for_step(trainer.steps_done) - before)
    assert trainer.digests() == undisturbed
    print(f"head killed: the slowest step took {slowest:.2f} s")
    assert slowest < LEASE_S, "no run has moved"
    time.sleep(max(0.0, began + WITHOUT_HEAD_S - time.monotonic()))
    assert cluster.living() == nodes
    assert cluster.train(front).digests() == undisturbed, cluster.machines.logs()


def test_a_cluster_grows_and_shrinks(on_ray: Callable[[int], OnRay], undisturbed: dict[str, str]) -> None:
    """A node that Ray has no room for is a demand that its autoscaler sees; one that is too much is drained first."""
    cluster = on_ray(1)
    code, servers, said = cluster.tinkex.up("2xCPU:1", fronts=1)
    assert code == 0, said + cluster.machines.logs()
    assert set(servers) == {"train-0", "train-1", "front-0"}
    code, servers, said = cluster.tinkex.up("3xCPU:1", fronts=1, wait_s=20)
    assert code == 1
    assert [name for name, row in servers.items() if not row["is_ready"]] == ["train-2"]
    assert "train-2 waits: Ray has no room for it yet" in said
    demands = cluster.machines.status()
    assert "{'CPU': 1.0}: 1+ pending tasks/actors" in demands, demands
    cluster.machines.add(cluster.machines.others[2])  # what an autoscaler does
    code, servers, said = cluster.tinkex.up("3xCPU:1", fronts=1)
    assert code == 0, said + cluster.machines.logs()
    assert len(cluster.living()) == 3
    check_secrets(cluster)

    trainer = cluster.train(servers["front-0"]["url"], pause_s=1.5)  # it takes longer than what follows
    last = servers["train-2"]["url"]
    moved = cluster.tinkex.cluster("move", trainer.run_id, last)
    assert moved.returncode == 0 and cluster.home_of(trainer.run_id) == last, moved.stderr
    code, servers, said = cluster.tinkex.up("1xCPU:1", fronts=1)
    assert code == 0 and set(servers) == {"train-0", "front-0"}, said
    assert "train-2 drains" in said and "train-2 has stopped" in said
    trainer.skip_to_now()
    assert trainer.steps_done < STEPS, "it was training meanwhile"
    assert cluster.living() == [servers["train-0"]["url"]]
    assert trainer.digests() == undisturbed, cluster.machines.logs()

    code, said = cluster.tinkex.down()
    assert code == 0, said
    assert cluster.living() == []
    assert not [words for _, words in marked(cluster.machines.mark) if "tinkex" in words]
    code, servers, said = cluster.tinkex.up("1xGPU:2", fronts=1)
    assert code == 0, said + cluster.machines.logs()
    assert "2.0 used of 2.0 reserved in placement groups" in cluster.machines.status()
    assert cluster.train(servers["front-0"]["url"]).digests() == undisturbed


def check_secrets(cluster: OnRay) -> None:
    """The secrets of the cluster are in no log of Ray and in no command line."""
    [(secret,)] = cluster.rows("SELECT content FROM secrets WHERE name = 'cluster'")
    shown = cluster.machines.everything_shown()
    assert "train-0" in shown, "the logs were read"
    for found in (secret, ACCESS["secret_access_key"], cluster.database, cluster.key):
        assert found not in shown
