"""A new release comes in node by node, by drain, while a client trains through a front and notices nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service.cluster import Cluster, Node
from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Raw, batch
from tests.integration.service.test_cluster import train
from tests.unit.store.postgres import PostgresServer
from tinkex import __version__

pytestmark = pytest.mark.full
OLD = "0.0.9"
AS_OLD = f"""
import tinkex._version
tinkex._version.__version__ = {OLD!r}
from tinkex.cli.main import main
raise SystemExit(main())
"""
REPLACED_AT = {8: 0, 22: 1}
"""Step of the client → the old node that is replaced then."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    postgres = PostgresServer()
    cluster = Cluster(postgres, tmp_path)
    yield cluster
    cluster.stop()
    postgres.stop()


def old_node(cluster: Cluster) -> Node:
    """A node that says it is of an older release."""
    node = Node(cluster, f"node{len(cluster.servers)}")
    assert node._words[1:3] == ["-m", "tinkex"]
    node._words[1:3] = ["-c", AS_OLD]
    return cluster._add(node)


def status(cluster: Cluster, *words: str) -> dict[str, Any]:
    """Run a command of `tinkex cluster`, then read what `status` says of each node."""
    place = ["--database-url-file", str(cluster.url_file), "--data-dir", str(cluster.folder / "cli")]
    for given in (words, ("status", "-o", "json")):
        if given:
            command = [sys.executable, "-m", "tinkex", "cluster", *given, *place]
            done = subprocess.run(command, capture_output=True, text=True, timeout=150)
            assert done.returncode == 0, done.stderr
    return {node["url"]: node for node in json.loads(done.stdout)["nodes"]}


def test_a_client_trains_on_while_its_nodes_are_replaced_one_by_one(cluster: Cluster) -> None:
    """Two nodes of an older release; each is drained and stopped once a new one is there. The weights: to the bit."""
    old = [old_node(cluster), old_node(cluster)]
    front = cluster.front()
    cluster.wait()
    homes: list[Node] = []

    def replace(step: int, run_id: str) -> None:
        if step not in REPLACED_AT:
            return
        new = cluster.node()
        new.wait_until_ready()
        leaving = old[REPLACED_AT[step]]
        homes.append(cluster.home_of(run_id))
        shown = status(cluster)
        assert (shown[leaving.url]["version"], shown[new.url]["version"]) == (OLD, __version__)
        shown = status(cluster, "drain", leaving.url)
        assert (shown[leaving.url]["runs"], shown[leaving.url]["is_draining"]) == (0, True)
        assert leaving.stop() == 0
        assert leaving.url not in status(cluster)

    found = train(front.url, replace)
    with LiveServer(cluster.folder / "single") as single:
        assert found == train(single.url, lambda step, run_id: None)
    assert homes[0] in old, "the run was at home on an old node"
    assert {node["version"] for node in status(cluster).values()} == {__version__}


def test_servers_of_two_releases_hand_requests_to_each_other(cluster: Cluster) -> None:
    servers = [old_node(cluster), cluster.node()]
    cluster.wait()
    for server, other in (servers, servers[::-1]):
        run = Raw(server).run(rank=2)
        run.client = Raw(other)
        assert run.done("forward", forward_input=batch())["metrics"]["loss:sum"] > 0
    assert {node["version"] for node in status(cluster).values()} == {OLD, __version__}
    command = [sys.executable, "-m", "tinkex", "cluster", "status", "--database-url-file", str(cluster.url_file)]
    done = subprocess.run(
        [*command, "--data-dir", str(cluster.folder / "cli")], capture_output=True, text=True, timeout=60
    )
    assert f"different releases ({OLD}, {__version__})" in done.stdout + done.stderr


def test_a_front_without_nodes_says_so(cluster: Cluster) -> None:
    front = cluster.front()
    cluster.wait()
    rejected = Raw(front).post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"})
    assert rejected.status == 503 and "retry-after" in rejected.headers
    assert "No node of this service lives" in rejected.text
