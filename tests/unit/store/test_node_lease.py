"""A node keeps its lease, and lives, whatever PostgreSQL says to a renewal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest

from tests.unit.store.conftest import Place
from tinkex.clock import REAL
from tinkex.server.cluster.node_lease import Node
from tinkex.server.cluster.placement import node_for_run
from tinkex.settings import ServeConfig
from tinkex.store.cluster.cluster_store import ClusterStore, NodeFacts

REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{}'; END $$ LANGUAGE plpgsql;
CREATE TRIGGER refuse BEFORE UPDATE ON nodes FOR EACH ROW EXECUTE FUNCTION refuse();
"""
DISK_FULL, READ_ONLY = "53100", "25006"


def execute(place: Place, statements: str) -> None:
    with psycopg.connect(place.url, autocommit=True) as connection:
        connection.execute(statements.encode())


@pytest.mark.parametrize("code", [DISK_FULL, READ_ONLY])
def test_a_node_whose_database_refuses_a_renewal_tries_again(code: str, postgres_place: Place, tmp_path: Path) -> None:
    """A standby that takes over is read-only for a moment. All nodes renew then, so all would end."""
    config = ServeConfig(
        data_dir=tmp_path,
        database_url=postgres_place.url,
        node_url="http://a",
        cluster_secret="s" * 40,
        node_lease_s=6.0,
    )

    async def run() -> None:
        node = Node(config, REAL, ["tinkex/tiny"], NodeFacts)
        await node.join()
        name = node.id
        execute(postgres_place, REFUSE.format(code))
        keeping = asyncio.create_task(node.keep())
        try:
            await asyncio.wait([keeping], timeout=2.3)
            assert not keeping.done()
        finally:
            execute(postgres_place, "DROP FUNCTION refuse CASCADE")
        held_until = node._sure_until
        async with asyncio.timeout(20):
            while node._sure_until == held_until:
                await asyncio.sleep(0.02)
        assert node._sure_until > held_until and node.id == name, "renewed, and never given up"
        keeping.cancel()
        await node.leave()

    asyncio.run(run())


def test_a_node_that_only_samples_says_so_when_it_joins(postgres_place: Place, tmp_path: Path) -> None:
    config = ServeConfig(
        data_dir=tmp_path,
        database_url=postgres_place.url,
        node_url="http://a",
        cluster_secret="s" * 40,
        samples_only=True,
    )

    async def run() -> None:
        node = Node(config, REAL, ["tinkex/tiny"], NodeFacts)
        await node.join()
        with ClusterStore.open(postgres_place.url, tmp_path) as store:
            [found] = store.list_nodes()
            assert found.id == node.id and not found.trains
            assert store.claim("s:train:0", "tinkex/tiny", node_for_run) is None, "no run is at home there"
        await node.leave()

    asyncio.run(run())
