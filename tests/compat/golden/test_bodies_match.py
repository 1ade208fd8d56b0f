"""Our bodies against the recorded ones: the same call gives the same bytes, for every field absent, null and set.

Only the pure functions are held against the recordings here: small stand-ins take the place of the clients, and turn
each call into the body that our client would send.
"""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinkex import types
from tinkex.wire import endpoints, requests
from tinkex.wire.body import PROTOBUF, Body
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

from . import protobuf
from .cases import CASES

T = SimpleNamespace(types=types)
DIALECTS = {"0.4.1": Dialect.JSON, "0.36.0": Dialect.PROTO}
SESSION, MODEL, SAMPLER = "session-1", "session-1:train:0", "session-1:sample:0"

# Ours is better than the recording on purpose.
BETTER = {
    ("0.4.1", "sample/params-unknown-field"): "the penalties are parameters of ours",
    ("0.36.0", "sample/params-unknown-field"): "the penalties are parameters of ours",
    ("0.4.1", "forward-backward/int-weights"): "float32 numbers are written as floats",
    ("0.4.1", "forward-backward/tensor-data-shape-none"): "no shape is no key, however it was not given",
}


class Calls:
    """What would be sent, in order."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.sent: list[tuple[str, Body]] = []

    def send(self, endpoint: Endpoint, body: Body, **parts: str) -> None:
        self.sent.append((endpoint.url(**parts), body))


class LowLevel(Calls):
    """`client.<resource>.<method>(request=...)`."""

    def __getattr__(self, resource: str) -> Any:
        return SimpleNamespace(**{method: self.sender(path) for method, path in RESOURCES[resource].items()})

    def sender(self, path: str) -> Any:
        async def send(request: Any) -> None:
            self.send(getattr(endpoints, path.upper()), requests.request(request, self.dialect))

        return send


RESOURCES = {
    "sampling": {"asample": "asample"},
    "models": {
        "create": "create_model",
        "get_info": "get_info",
        "unload": "unload_model",
        "copy_weights": "copy_weights",
    },
    "training": {"forward": "forward", "forward_backward": "forward_backward", "optim_step": "optim_step"},
    "weights": {
        "save": "save_weights",
        "load": "load_weights",
        "save_for_sampler": "save_weights_for_sampler",
        "save_external": "save_weights_external",
    },
    "service": {"create_session": "create_session", "create_sampling_session": "create_sampling_session"},
}


class Training(Calls):
    def forward_backward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> None:
        body = requests.forward_backward(MODEL, 1, data, loss_fn, loss_fn_config, dialect=self.dialect)
        self.send(endpoints.FORWARD_BACKWARD, body)

    def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> None:
        body = requests.forward_backward(
            MODEL, 1, data, loss_fn, loss_fn_config, forward_only=True, dialect=self.dialect
        )
        self.send(endpoints.FORWARD if self.dialect is Dialect.JSON else endpoints.FORWARD_BACKWARD, body)

    def optim_step(self, optim_params: Any = None, adam_params: Any = None) -> None:
        params = optim_params if adam_params is None else adam_params
        params = types.AdamParams(**params) if isinstance(params, dict) else params
        self.send(endpoints.OPTIM_STEP, requests.optim_step(MODEL, 1, params, dialect=self.dialect))

    def save_state(self, name: str, **options: Any) -> None:
        self.send(endpoints.SAVE_WEIGHTS, requests.save_weights(MODEL, 1, name, **options, dialect=self.dialect))

    def save_weights_for_sampler(self, name: str, **options: Any) -> None:
        body = requests.save_weights_for_sampler(MODEL, 1, name, **options, dialect=self.dialect)
        self.send(endpoints.SAVE_WEIGHTS_FOR_SAMPLER, body)

    def save_weights_external(self, name: str, **options: Any) -> None:
        self.send(endpoints.SAVE_WEIGHTS_EXTERNAL, requests.save_weights_external(MODEL, 1, name, **options))

    def load_state(self, path: str, **options: Any) -> None:
        self.send(endpoints.LOAD_WEIGHTS, requests.load_weights(MODEL, 1, path, **options, dialect=self.dialect))

    def load_state_with_optimizer(self, path: str) -> None:
        self.load_state(path, optimizer=True)

    def get_info(self) -> None:
        self.send(endpoints.GET_INFO, requests.get_info(MODEL, dialect=self.dialect))


class Sampling(Calls):
    def sample(self, prompt: Any, num_samples: int, sampling_params: Any, **options: Any) -> None:
        if "include_prompt_logprobs" in options:
            options["prompt_logprobs"] = options.pop("include_prompt_logprobs")
        ids: dict[str, Any] = {"sampling_session_id": SAMPLER, "seq_id": len(self.sent)}
        body = requests.asample(prompt, num_samples, sampling_params, **ids, **options, dialect=self.dialect)
        self.send(endpoints.ASAMPLE, body)

    def compute_logprobs(self, prompt: Any, **options: Any) -> None:
        self.sample(prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, **options)


class Service(Calls):
    def create_lora_training_client(self, base_model: str, **options: Any) -> None:
        outer: dict[str, Any] = {name: options.pop(name) for name in ("user_metadata", "optimizer") if name in options}
        outer["optimizer_config"] = outer.pop("optimizer", None)
        layers = {"rank": 32, "seed": None, "train_unembed": True, "train_mlp": True, "train_attn": True}
        lora = types.LoraConfig(**(layers | options))
        models = sum(url.endswith("create_model") for url, _ in self.sent)
        body = requests.create_model(SESSION, models, base_model, lora, **outer, dialect=self.dialect)
        self.send(endpoints.CREATE_MODEL, body)

    def create_sampling_client(self, **options: Any) -> None:
        body = requests.create_sampling_session(SESSION, 0, **options, dialect=self.dialect)
        self.send(endpoints.CREATE_SAMPLING_SESSION, body)

    def close(self, reason: str, detail: str | None = None) -> None:
        self.send(endpoints.FINISH_SESSION, requests.finish_session(reason, detail), session_id=SESSION)

    def get_server_capabilities(self) -> None:
        pass


class Rest(Calls):
    def search_sessions(self, query: Any) -> None:
        self.send(endpoints.SEARCH_SESSIONS, requests.search_sessions(query))

    def assign_session_project(self, session_id: str, project_id: str) -> None:
        self.send(endpoints.SET_SESSION_PROJECT, requests.set_session_project(project_id), session_id=session_id)

    def get_weights_info_by_tinker_path(self, path: str) -> None:
        self.send(endpoints.WEIGHTS_INFO, requests.weights_info(path))

    def set_checkpoint_ttl_from_tinker_path(self, path: str, ttl_seconds: int | None) -> None:
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
        ids = {"run_id": parsed.training_run_id, "checkpoint_id": parsed.checkpoint_id}
        self.send(endpoints.SET_CHECKPOINT_TTL, requests.set_checkpoint_ttl(ttl_seconds), **ids)


CLIENTS: dict[str, type[Calls]] = {
    "low_level": LowLevel,
    "training": Training,
    "sampling": Sampling,
    "service": Service,
    "rest": Rest,
}
# Cases of one request each, whatever the client does besides.
FAMILIES = (
    "low-level/",
    "forward-backward/",
    "forward/",
    "optim-step/",
    "save-state/",
    "save-for-sampler/",
    "save-external/",
    "load-state/",
    "get-info",
    "sample/params-",
    "sample/prompt-",
    "sample/topk-",
    "sample/target-",
    "sample/image",
    "sample/two-samples",
    "sample/empty-prompt",
    "sample/appended-prompt",
    "sample/dmel",
    "compute-logprobs/",
    "create-model/",
    "create-sampling-session/",
    "session/finish-",
    "rest/session/search-",
    "rest/session/assign",
    "rest/checkpoint/ttl",
    "rest/checkpoint/weights-info",
)
# How the client cuts and compresses is its own business, and torch is not installed here.
ELSEWHERE = ("forward-backward/chunks-", "forward-backward/zstd", "session/finish-without-session", "low-level/health")


def recordings() -> list[tuple[str, str, dict[str, Any]]]:
    out = []
    for file in sorted((Path(__file__).parent / "requests").glob("*.json")):
        data = json.loads(file.read_text())
        out += [(data["version"], name, entry) for name, entry in data["requests"].items()]
    return out


def comparable() -> list[Any]:
    rows = []
    for version, name, entry in recordings():
        sent = [r for r in entry["requests"] if "body" in r or "protobuf" in r]
        sent = [r for r in sent if not r["path"].endswith("/retrieve_future")]
        wanted = name.startswith(FAMILIES) and not name.startswith(ELSEWHERE) and not CASES[name].needs_torch
        if wanted and sent and entry["raised"] is None and (version, name) not in BETTER:
            rows.append(pytest.param(version, name, sent, id=f"{version}-{name}"))
    return rows


@pytest.mark.parametrize(("version", "name", "recorded"), comparable())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_our_body_is_the_recorded_one(version: str, name: str, recorded: list[dict[str, Any]]) -> None:
    case = CASES[name]
    client = CLIENTS[case.on](DIALECTS[version])
    outcome = case.act(T, client)
    if asyncio.iscoroutine(outcome):
        asyncio.run(outcome)
    assert [url for url, _ in client.sent] == [request["path"] for request in recorded]
    for (_, body), request in zip(client.sent, recorded, strict=True):
        assert body.content_type == request["headers"]["content-type"]
        if body.content_type == PROTOBUF:
            expected = base64.b64decode(request["protobuf"])
            # As text, because NaN differs from itself.
            assert str(protobuf.decode("ForwardBackwardRequest", body.content)) == str(request["decoded"])
            assert protobuf.canonical("ForwardBackwardRequest", body.content) == expected
        else:
            assert spelled(body.content.decode()) == spelled(request["body"])


def spelled(text: str) -> str:
    """JSON with its keys in order and its numbers in one spelling: 1e-08 and 1e-8 are the same double."""
    return json.dumps(json.loads(text))


def test_the_recordings_cover_every_body_that_is_compared() -> None:
    """A family without a recording would compare nothing, and nobody would notice."""
    names = {row.values[1] for row in comparable()}
    assert [family for family in FAMILIES if not any(name.startswith(family) for name in names)] == []
    assert {row.values[0] for row in comparable()} == set(DIALECTS)
