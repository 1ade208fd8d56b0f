"""Whom a request concerns, read without its data; and which node a sample goes to."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.server.conftest import Served
from tinkex.clock import REAL
from tinkex.server.cluster.peers import Peers
from tinkex.server.cluster.routing import Concern, concern_of
from tinkex.server.http.requests import IN_THREAD_BYTES, ApiRequest
from tinkex.store.cluster.cluster_store import NodeRecord
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.body import PROTOBUF

NODE = "0123456789abcdef"


def concern(served: Served, path: str, body: object, method: str = "POST", kind: str = "application/json") -> Concern:
    """What a request to this path is about, without its body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        return messages.pop()

    scope = {
        "type": "http", "method": method, "path": path, "headers": [(b"content-type", kind.encode())],
        "query_string": b"", "app": served.app, "state": {"tenant": "local"},
    }  # fmt: skip

    async def read() -> Concern:
        request = ApiRequest(scope, receive)
        try:
            return await concern_of(request, f"/api/v1/{path}")
        finally:
            request.give_back_body()

    found = served.run(read())
    assert found.body is None or found.body == content
    return found


@pytest.mark.parametrize(
    ("path", "body", "kind", "name"),
    [
        ("optim_step", {"model_id": "s:train:0", "seq_id": 1}, "run", "s:train:0"),
        ("load_weights", {"model_id": "s:train:0", "path": "tinker://x"}, "run", "s:train:0"),
        ("load_weights", {"session_id": "s", "model_seq_id": 3, "path": "tinker://x"}, "new_run", "s:train:3"),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "tiny"}, "new_run", "s:train:0"),
        ("retrieve_future", {"request_id": "op-1"}, "operation", "op-1"),
        ("retrieve_future", {"request_id": f"sample-{NODE}-{'1' * 32}"}, "sample", NODE),
        ("cancel_future", {"request_id": f"sample-{NODE}-{'1' * 32}"}, "sample", NODE),
        ("retrieve_future", {"request_id": f"sample-{'1' * 32}"}, "operation", f"sample-{'1' * 32}"),
        ("optim_step", {"model_id": 5}, "none", ""),
        ("optim_step", b"{", "none", ""),
        ("create_model", {"session_id": "s", "model_seq_id": "0"}, "none", ""),
        ("create_session", {"model_id": "s:train:0"}, "none", ""),
    ],
)
def test_a_request_concerns_what_its_json_names(served: Served, path: str, body: Any, kind: str, name: str) -> None:
    found = concern(served, path, body)
    assert (found.kind, found.name) == (kind, name)


def test_the_steps_of_a_run_concern_it_and_a_list_of_runs_does_not(served: Served) -> None:
    assert concern(served, "training_runs/s%3Atrain%3A0/steps", b"", "GET").name == "s:train:0"
    assert concern(served, "training_runs/s:train:0/steps", b"", "GET") == Concern("run", "s:train:0")
    assert concern(served, "training_runs", b"", "GET").kind == "none"


@pytest.mark.parametrize("large", [False, True])
def test_a_pass_concerns_its_run_however_large_and_whatever_is_in_its_data(served: Served, large: bool) -> None:
    decoy = {"model_id": "no:train:1", "x": "y" * (IN_THREAD_BYTES if large else 1)}
    batch = {"data": [decoy, decoy], "loss_fn": "cross_entropy"}
    for body in ({"forward_input": batch, "model_id": "s:train:0"}, {"model_id": "s:train:0", "forward_input": batch}):
        assert concern(served, "forward", body).name == "s:train:0"
    message = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=4)
    message.data.add().model_input_spans.add().prompt_tokens.sequence_id = "y" * (IN_THREAD_BYTES if large else 1)
    found = concern(served, "forward_backward", message.SerializeToString(), kind=PROTOBUF)
    assert (found.kind, found.name) == ("run", "s:train:0")
    assert concern(served, "forward_backward", b"\xff" * 100, kind=PROTOBUF).kind == "none"


def test_samples_that_begin_alike_meet_and_only_those_of_a_lost_node_move() -> None:
    living = [NodeRecord(id=f"n{number}", url=f"http://n{number}", models=("tiny",), version="") for number in range(4)]
    reads = SimpleNamespace(list_nodes=lambda: living)

    async def choose(keys: int) -> list[str]:
        async def call(read: Any) -> Any:
            return read()

        peers = Peers(REAL, cast(Any, reads), cast(Any, call))
        return [cast(NodeRecord, await peers.choose(f"key {number}", "tiny")).id for number in range(keys)]

    before = asyncio.run(choose(400))
    assert before == asyncio.run(choose(400))
    assert all(60 < before.count(node.id) < 140 for node in living)
    lost = living.pop().id
    after = asyncio.run(choose(400))
    assert [new for old, new in zip(before, after, strict=True) if old != lost] == [
        old for old in before if old != lost
    ]
    assert lost not in after


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
