"""The console of real nodes and of a front: each shows all nodes, and where a run is at home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service.cluster import Cluster
from tests.integration.service.raw import Raw, batch
from tests.product.console.browser import Browser
from tests.product.console.conftest import PICTURES
from tests.unit.store.postgres import PostgresServer

pytestmark = pytest.mark.full


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    postgres = PostgresServer()
    cluster = Cluster(postgres, tmp_path)
    for start in (cluster.node, cluster.node, cluster.front):
        start()
    cluster.wait()
    yield cluster
    cluster.stop()
    postgres.stop()


def test_every_server_shows_all_nodes_and_where_a_run_is_at_home(cluster: Cluster, tmp_path: Path) -> None:
    front = cluster.servers[2]
    runs = [Raw(front).run(rank=2) for _ in range(3)]
    for run in runs:
        run.done("forward_backward", forward_backward_input=batch())
    with Browser(tmp_path / "browser") as browser:
        for server in cluster.servers:
            browser.open(f"{server.url}/")
            browser.click("nav a", "Cluster")
            browser.wait_text("2 nodes with 3 runs")
            for node in cluster.servers[:2]:
                browser.wait_text(node.url)
            browser.picture(PICTURES / f"cluster-real-{cluster.servers.index(server)}.png")
            browser.go(f"{server.url}/#/runs/{runs[0].id}")
            browser.wait_text(cluster.home_of(runs[0].id).url, ".facts")
        cluster.servers[0].kill()
        browser.go(f"{front.url}/#/cluster")
        browser.wait_text("1 node with")
        browser.wait_text("gone")
        browser.picture(PICTURES / "cluster-real-killed.png")
        assert browser.complaints() == []
