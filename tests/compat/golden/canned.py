"""Plausible answers to every endpoint of the API, in both dialects. Nothing is trained: numbers are constants.

Every number is exact in float32, and every id follows from the request, so a recording does not depend on timing.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import protobuf as pb

RUN = "session-1:train:0"
SAMPLER = "session-1:sample:0"
PROTOBUF = "application/x-protobuf"
CHECKPOINT = {
    "checkpoint_id": "weights/0001",
    "checkpoint_type": "training",
    "time": "2026-01-02T03:04:05Z",
    "tinker_path": f"tinker://{RUN}/weights/0001",
    "size_bytes": 4096,
    "public": False,
}
TRAINING_RUN = {
    "training_run_id": RUN,
    "base_model": "Qwen/Qwen3-8B",
    "model_owner": "owner-1",
    "is_lora": True,
    "lora_rank": 16,
    "last_request_time": "2026-01-02T03:04:05Z",
    "user_metadata": {"from": "run"},
}
CURSOR = {"offset": 0, "limit": 20, "total_count": 1}


@dataclass(frozen=True)
class Request:
    method: str
    endpoint: str  # the path below /api/v1/, without query
    query: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        return json.loads(self.body) if self.body else {}

    @property
    def accepts_protobuf(self) -> bool:
        return PROTOBUF in self.headers.get("accept", "")


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    release: threading.Event | None = None  # held back until this is set


def as_json(value: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


def as_protobuf(body: bytes) -> Answer:
    return Answer(200, body, {"Content-Type": PROTOBUF})


Result = Callable[[Request], Answer]


class Service:
    """Answers requests; remembers only which future stands for which result."""

    def __init__(self, config: dict[str, Any] | None, dynamic_config: dict[str, Any]) -> None:
        self.config = config  # None: an old service, which does not know client/config
        self.dynamic_config = dynamic_config
        self.futures: dict[str, Result] = {}

    def answer(self, request: Request) -> Answer:
        plain = PLAIN.get((request.method, request.endpoint))
        if plain is not None:
            return as_json(plain(request))
        submit = FUTURES.get(request.endpoint) if request.method == "POST" else None
        if submit is not None:
            return self.submitted(request, submit)
        if request.endpoint == "retrieve_future":
            return self.futures[request.json()["request_id"]](request)
        if request.endpoint == "client/config":
            return NOT_FOUND if self.config is None else as_json(self.config)
        if request.endpoint == "client/dynamic_config":
            return NOT_FOUND if self.config is None else as_json(self.dynamic_config)
        if request.endpoint == "retrieve_futures":
            if request.json()["prev_cursor"]:
                return Answer(release=threading.Event())  # a long poll on which nothing happens
            waiting = [name for name in self.futures if name.startswith("asample")]
            return as_json({"completions": [{"state": "finished", "request_id": w} for w in waiting], "cursor": 1})
        for method, pattern, answer in PATTERNS:
            if method == request.method and re.fullmatch(pattern, request.endpoint):
                return answer(request)
        return NOT_FOUND

    def submitted(self, request: Request, submit: Callable[[Request], tuple[str, Result, dict[str, Any]]]) -> Answer:
        number, result, extra = submit(request)
        request_id = f"{request.endpoint}-{number}"
        self.futures[request_id] = result
        return as_json({"request_id": request_id, **extra})


NOT_FOUND = as_json({"detail": "Not Found"}, 404)
NOTHING = as_json(None)


def fixed(value: object) -> Callable[[Request], object]:
    return lambda request: value


def jwt() -> str:
    """An unsigned token that is valid until the year 2100."""
    claims = {
        "sub": "tml:user:1",
        "org_id": "org-1",
        "email": "user@example.org",
        "exp": 4102444800,
        "iss": "passport-1",
    }
    parts = [json.dumps({"alg": "none"}), json.dumps(claims), "signature"]
    return ".".join(base64.urlsafe_b64encode(part.encode()).rstrip(b"=").decode() for part in parts)


def sampling_session(request: Request) -> object:
    body = request.json()
    return {"sampling_session_id": f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"}


PLAIN: dict[tuple[str, str], Callable[[Request], object]] = {
    ("POST", "auth/token"): lambda request: {"jwt": jwt()},
    ("POST", "create_session"): fixed({"type": "create_session", "session_id": "session-1"}),
    ("POST", "session_heartbeat"): fixed({"type": "session_heartbeat"}),
    ("POST", "create_sampling_session"): sampling_session,
    ("POST", "join_sampling_session"): fixed({"client_counter": 3}),
    ("POST", "cancel_future"): fixed({}),
    ("POST", "telemetry"): fixed({"status": "accepted"}),
    ("POST", "get_info"): fixed(
        {
            "model_id": RUN,
            "model_data": {"arch": "qwen3", "model_name": "Qwen/Qwen3-8B"},
            "is_lora": True,
            "lora_rank": 16,
        }
    ),
    ("POST", "weights_info"): fixed(
        {"base_model": "Qwen/Qwen3-8B", "is_lora": True, "lora_rank": 16, "train_unembed": False, "train_mlp": True}
    ),
    ("POST", "copy_weights"): fixed({"tinker_path": f"tinker://{RUN}/weights/copy"}),
    ("POST", "sessions/search"): fixed({"sessions": [], "next_cursor": None}),
    ("GET", "get_server_capabilities"): fixed({"supported_models": [{"model_name": "Qwen/Qwen3-8B"}]}),
    ("GET", "healthz"): fixed({"status": "ok"}),
    ("GET", "training_runs"): fixed({"training_runs": [TRAINING_RUN], "cursor": CURSOR}),
    ("GET", "checkpoints"): fixed({"checkpoints": [CHECKPOINT], "cursor": CURSOR}),
    ("GET", "sessions"): fixed({"sessions": ["session-1"]}),
    ("GET", "audit"): fixed({"entries": []}),
    ("GET", "billing/usage/events"): fixed({"data": []}),
    ("GET", "billing/usage/checkpoints/current"): fixed({"data": []}),
}

URLS = {"urls": {"adapter_model.safetensors": "https://files.example.org/1"}, "expires": "2026-10-21T07:28:00Z"}
ARCHIVE = Answer(
    302,
    b"",
    {"Location": "https://files.example.org/archive.tar", "Expires": "Wed, 21 Oct 2026 07:28:00 GMT"},
)
PATTERNS: list[tuple[str, str, Callable[[Request], Answer]]] = [
    ("GET", r"training_runs/[^/]+", lambda request: as_json(TRAINING_RUN)),
    ("GET", r"training_runs/[^/]+/checkpoints", lambda request: as_json({"checkpoints": [CHECKPOINT]})),
    ("GET", r"training_runs/[^/]+/checkpoints/[^/]+/[^/]+/archive", lambda request: ARCHIVE),
    ("GET", r"training_runs/[^/]+/checkpoints/[^/]+/[^/]+/external_weights_urls", lambda request: as_json(URLS)),
    ("PUT", r"training_runs/[^/]+/checkpoints/[^/]+/[^/]+/ttl", lambda request: NOTHING),
    ("POST", r"training_runs/[^/]+/checkpoints/[^/]+/[^/]+/publish", lambda request: NOTHING),
    ("DELETE", r"training_runs/[^/]+/checkpoints/[^/]+/[^/]+(/publish)?", lambda request: NOTHING),
    ("GET", r"samplers/[^/]+", lambda request: as_json({"sampler_id": SAMPLER, "base_model": "Qwen/Qwen3-8B"})),
    ("POST", r"sessions/[^/]+/finish", lambda request: as_json({})),
    ("PUT", r"sessions/[^/]+/project", lambda request: NOTHING),
    (
        "GET",
        r"sessions/[^/]+/trace_export",
        lambda request: as_json({"status": "ready", "url": "https://files.example.org/t"}),
    ),
    ("GET", r"sessions/[^/]+", lambda request: as_json({"training_run_ids": [RUN], "sampler_ids": [SAMPLER]})),
]


def constant(**value: object) -> Result:
    return lambda request: as_json(value)


def submit_create_model(request: Request) -> tuple[str, Result, dict[str, Any]]:
    body = request.json()
    return str(body["model_seq_id"]), constant(model_id=f"{body['session_id']}:train:{body['model_seq_id']}"), {}


def submit_custom_loss(request: Request) -> tuple[str, Result, dict[str, Any]]:
    return str(request.json()["custom_loss_seq_id"]), constant(loss_id="loss-1"), {}


def submit_unload(request: Request) -> tuple[str, Result, dict[str, Any]]:
    return "0", constant(model_id=RUN), {}


def submit_optim_step(request: Request) -> tuple[str, Result, dict[str, Any]]:
    return str(request.json().get("seq_id")), constant(metrics={"grad_norm:mean": 0.5}), {}


def submit_save(request: Request) -> tuple[str, Result, dict[str, Any]]:
    body, kind = request.json(), {"save_weights": "weights", "save_weights_external": "external_weights"}
    path = f"tinker://{body['model_id']}/{kind[request.endpoint]}/{body.get('path')}"
    return str(body.get("seq_id")), constant(path=path), {}


def submit_save_for_sampler(request: Request) -> tuple[str, Result, dict[str, Any]]:
    body = request.json()
    if body.get("path") is not None:
        result = constant(path=f"tinker://{body['model_id']}/sampler_weights/{body['path']}")
    else:
        result = constant(sampling_session_id=f"session-1:sample:{body.get('sampling_session_seq_id')}")
    return str(body.get("seq_id")), result, {}


def submit_load(request: Request) -> tuple[str, Result, dict[str, Any]]:
    body = request.json()
    model_id = body.get("model_id") or f"{body.get('session_id')}:train:{body.get('model_seq_id')}"
    return str(body.get("seq_id", "create")), constant(path=body["path"], model_id=model_id), {}


def submit_forward_backward(request: Request) -> tuple[str, Result, dict[str, Any]]:
    if PROTOBUF in request.headers.get("content-type", ""):
        message = pb.decode("ForwardBackwardRequest", request.body)
        data, number = message.get("data", []), message.get("seq_id", 0)
    else:
        message = request.json()
        data, number = (
            (message.get("forward_backward_input") or message["forward_input"])["data"],
            message.get("seq_id"),
        )
    shapes = [shape_of(datum.get("loss_fn_inputs", {}).get("target_tokens", {})) for datum in data]
    return str(number), lambda poll: forward_backward_result(poll, shapes), {}


def shape_of(tensor: dict[str, Any]) -> list[int]:
    return tensor.get("shape") or [len(tensor.get("data") or tensor.get("dense") or [0])]


def forward_backward_result(poll: Request, shapes: list[list[int]]) -> Answer:
    metrics = {"loss:sum": 1.5}
    counts = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    if poll.accepts_protobuf:
        # One record per datum: rows of different widths cannot share a batched tensor.
        records = [
            pb.array_record({"logprobs": pb.batched_tensor("float32", [pb.pack("f", [-0.5] * count)], shape[1:])}, 1)
            for count, shape in zip(counts, shapes, strict=True)
        ]
        return as_protobuf(pb.forward_backward_output(records, metrics))
    outputs = [
        {"logprobs": {"data": [-0.5] * count, "dtype": "float32", "shape": shape}}
        for count, shape in zip(counts, shapes, strict=True)
    ]
    return as_json({"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": metrics})


def submit_sample(request: Request) -> tuple[str, Result, dict[str, Any]]:
    body = request.json()
    count = body.get("num_samples", 1)
    number = body.get("seq_id", 0)
    return (
        str(number),
        lambda poll: sample_result(poll, body),
        {"sample_sequence_ids": [f"{number}:{i}" for i in range(count)]},
    )


def sample_result(poll: Request, body: dict[str, Any]) -> Answer:
    count, topk = body.get("num_samples", 1), body.get("topk_prompt_logprobs", 0)
    length = sum(len(chunk["tokens"]) for chunk in body["prompt"]["chunks"] if isinstance(chunk.get("tokens"), list))
    scored = min(body.get("prompt_logprobs_last_n") or length, length - 1)
    if not poll.accepts_protobuf:
        answer: dict[str, Any] = {
            "sequences": [{"stop_reason": "length", "tokens": [7, 8], "logprobs": [-0.5, -0.25]}] * count
        }
        if body.get("prompt_logprobs"):
            answer["prompt_logprobs"] = [None] * (length - scored) + [-0.5] * scored
        if topk:
            answer["topk_prompt_logprobs"] = [None] + [[[5, -0.5]] * topk] * (length - 1)
        return as_json(answer)
    sampled_topk = (
        pb.topk_logprobs([[(5, -0.5)] * body["topk_sample_logprobs"]] * 2) if body.get("topk_sample_logprobs") else None
    )
    out = b"".join(pb.field(1, pb.sampled_sequence(1, [7, 8], [-0.5, -0.25], sampled_topk)) for _ in range(count))
    if body.get("prompt_logprobs"):
        out += pb.field(2, pb.pack("f", [float("nan")] * (length - scored) + [-0.5] * scored))
    if topk:
        out += pb.field(3, pb.topk_logprobs([[(0, -99999.0)] * topk] + [[(5, -0.5)] * topk] * (length - 1)))
    if body.get("target_prompt_logprobs"):
        shape = body["target_prompt_logprobs"]["shape"]
        out += pb.field(5, pb.tensor("float32", shape, pb.pack("f", [-0.5] * shape[0] * shape[1])))
    if wanted := body.get("prompt_alt_tokens_k"):
        shape = [length - 1, wanted]
        tokens = pb.tensor("int64", shape, pb.pack("q", [5] * shape[0] * wanted))
        logprobs = pb.tensor("float32", shape, pb.pack("f", [-0.5] * shape[0] * wanted))
        out += pb.field(6, pb.field(1, tokens) + pb.field(2, logprobs))
    return as_protobuf(out)


FUTURES: dict[str, Callable[[Request], tuple[str, Result, dict[str, Any]]]] = {
    "create_model": submit_create_model,
    "create_custom_loss": submit_custom_loss,
    "unload_model": submit_unload,
    "forward": submit_forward_backward,
    "forward_backward": submit_forward_backward,
    "optim_step": submit_optim_step,
    "save_weights": submit_save,
    "save_weights_external": submit_save,
    "save_weights_for_sampler": submit_save_for_sampler,
    "load_weights": submit_load,
    "asample": submit_sample,
}
