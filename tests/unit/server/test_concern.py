"""What a request is about, read without its data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.server.conftest import Served
from tinkex.server.cluster.concern import Concern, concern_of
from tinkex.server.http.requests import IN_THREAD_BYTES, ApiRequest
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
            return await concern_of(request, path if path.startswith("/") else f"/api/v1/{path}")
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


def test_a_run_is_deleted_at_its_home_and_found_or_renamed_anywhere(served: Served) -> None:
    found = concern(served, "training_runs/s%3Atrain%3A0", b"", "DELETE")
    assert (found.kind, found.name, found.is_read) == ("run", "s:train:0", False)
    assert concern(served, "training_runs/s:train:0", b"{}", "PATCH").kind == "none"
    assert concern(served, "training_runs/find", b"", "GET").kind == "none"
    assert concern(served, "training_runs/s:train:0/checkpoints/weights/a", b"", "DELETE").kind == "none"


def test_the_steps_of_a_run_concern_it_and_a_list_of_runs_does_not(served: Served) -> None:
    assert concern(served, "training_runs/s%3Atrain%3A0/steps", b"", "GET").name == "s:train:0"
    assert concern(served, "training_runs/s:train:0/steps", b"", "GET") == Concern("run", "s:train:0", is_read=True)
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


@pytest.mark.parametrize("prefix", ["/v1", "/oai/api/v1"])
def test_a_completion_concerns_its_model_and_how_its_prompt_begins(served: Served, prefix: str) -> None:
    """A front handed it to any node, which might not have the model."""

    def ask(path: str, method: str = "POST", **body: Any) -> Concern:
        return concern(served, path, body, method)

    first = ask(f"{prefix}/completions", model="tiny", prompt="a" * 5000 + "b", n=3)
    assert (first.kind, first.model, first.sequences) == ("sampler", "tiny", 3)
    assert first.name == ask(f"{prefix}/completions", model="tiny", prompt="a" * 5000 + "c").name
    assert first.name != ask(f"{prefix}/completions", model="tiny", prompt="b").name
    chat = [{"role": "user", "content": "hello"}]
    saved = ask(f"{prefix}/chat/completions", model="tinker://r/sampler_weights/1", messages=chat, n="many")
    assert (saved.kind, saved.model, saved.sequences) == ("sampler", None, 1)
    assert saved.checkpoint == "tinker://r/sampler_weights/1"
    assert ask(f"{prefix}/models/org%2Fother", "GET").model == "org/other"
    assert ask(f"{prefix}/models/tinker%3A%2F%2Fr/sampler_weights/1", "GET").checkpoint == saved.checkpoint
    assert ask(f"{prefix}/models", "GET").kind == "none"


def test_what_needs_a_model_names_it(served: Served) -> None:
    assert concern(served, "tokenizers/org/other/tokenizer.json", b"", "GET").model == "org/other"
    made = concern(served, "create_sampling_session", {"session_id": "s", "base_model": "other"})
    assert (made.kind, made.model) == ("none", "other")
    path = "tinker://r/sampler_weights/1"
    assert concern(served, "create_sampling_session", {"session_id": "s", "model_path": path}).checkpoint == path
    steps = concern(served, "training_runs/r/steps", b"", "GET")
    assert steps.is_read and not concern(served, "optim_step", {"model_id": "r"}).is_read
