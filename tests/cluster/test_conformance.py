"""The official clients and ours through every step of the flow, each request to the other one of two fronts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat.conformance.matrix import MODELS, OURS, drive
from tests.faults.history import Recorder
from tests.faults.proxy import Proxy
from tests.integration.service.cluster import Cluster
from tests.unit.store.postgres import PostgresServer

CLIENTS = ("0.4.1", "0.25.0", "0.36.0", OURS)
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two fronts, two nodes with both models."""
    postgres = PostgresServer()
    cluster = Cluster(postgres, tmp_path_factory.mktemp("conformance"))
    for _ in range(2):
        cluster.front()
    for _ in range(2):
        cluster.node("--threads", "1", "--node-lease-s", "15", models=MODELS)
    cluster.wait()
    yield cluster
    cluster.stop()
    postgres.stop()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("client", CLIENTS)
def test_every_step_passes_through_two_fronts_in_turn(client: str, model: str, fronts: Cluster) -> None:
    proxy = Proxy([server.port for server in fronts.servers[:2]], (), Recorder(), by_request=True)
    try:
        outcome = drive(client, proxy.url, model)
    finally:
        proxy.close()
    assert outcome.is_whole, f"{outcome.output}\n{fronts.logs()}"
    assert proxy.requests > 40, "the proxy was not used"
