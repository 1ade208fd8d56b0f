"""What a server remembers of the others: which node a sample goes to, and which one it was drawn on."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from tinkex.clock import REAL
from tinkex.server.cluster.peers import Peers
from tinkex.store.cluster.cluster_store import NodeRecord
from tinkex.testing.clock import FakeClock


def test_what_was_sent_to_a_node_counts_until_it_renews() -> None:
    """Its own number is some seconds old: without this, a burst of one prompt would all go to one node."""
    rows = [NodeRecord(id=f"n{number}", url=f"http://n{number}", models=("tiny",), version="") for number in range(4)]
    living = [replace(row, left_s=15.0) for row in rows]
    clock = FakeClock()
    reads = SimpleNamespace(list_nodes=lambda: living)

    async def call(read: Any) -> Any:
        return read()

    async def choose(peers: Peers, times: int) -> list[str]:
        return [cast(NodeRecord, await peers.choose("one prompt", "tiny", sequences=16)).id for _ in range(times)]

    peers = Peers(clock, cast(Any, reads), cast(Any, call))
    burst = asyncio.run(choose(peers, 40))
    assert Counter(burst[:4]) == {burst[0]: 4}, "up to what an engine draws at the same time they stay together"
    assert max(Counter(burst).values()) <= 14 and len(set(burst)) == 4
    clock.advance(5.0)
    living = [replace(row, left_s=15.0) for row in rows]  # all have renewed, and are idle
    assert asyncio.run(choose(peers, 1)) == [burst[0]]


def test_a_node_that_has_just_joined_is_found_at_once() -> None:
    """Before, its samples were taken for lost for a second, and a client that asked again three times gave up."""
    living = [NodeRecord(id="a" * 16, url="http://a", models=("tiny",), version="")]
    reads = SimpleNamespace(list_nodes=lambda: list(living))
    asked = 0

    async def call(function: Any, *args: object) -> Any:
        nonlocal asked
        asked += 1
        return function(*args)

    async def find() -> list[str | None]:
        peers = Peers(REAL, cast(Any, reads), cast(Any, call))
        first = await peers.url_of("a" * 16)
        living.append(NodeRecord(id="b" * 16, url="http://b", models=("tiny",), version=""))
        return [first, await peers.url_of("b" * 16), await peers.url_of("a" * 16), await peers.url_of("c" * 16)]

    assert asyncio.run(find()) == ["http://a", "http://b", "http://a", None]
    assert asked == 3, "only a node that is not known is looked up again"
