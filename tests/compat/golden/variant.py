"""A variant: one operation on a client while the service answers in a particular way, and what came of it."""

from __future__ import annotations

import base64
import contextlib
import datetime
import enum
import functools
import json
import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .canned import Answer, as_json, as_protobuf
from .case import BOTH, Case, environment, make_client, play
from .server import GoldenServer

RUN = "session-0:train:0"


@dataclass(frozen=True)
class Variant:
    name: str
    operation: str  # a key of OPERATIONS
    script: dict[str, list[Answer]]
    versions: tuple[str, ...] = BOTH
    config: dict[str, Any] = field(default_factory=dict)


ALL: dict[str, Variant] = {}


def variant(
    name: str, operation: str, script: dict[str, list[Answer]], versions: tuple[str, ...] = BOTH, **config: Any
) -> None:
    assert name not in ALL, f"two variants are called {name}"
    ALL[name] = Variant(name, operation, script, versions, config)


def poll(name: str, operation: str, *answers: Any, versions: tuple[str, ...] = BOTH, **config: Any) -> None:
    """The answers to the operation's polls: an Answer, bytes for protobuf, or a value for JSON."""
    variant(name, operation, {"retrieve_future": [answer_of(a) for a in answers]}, versions, **config)


def answer_of(value: Any) -> Answer:
    if isinstance(value, Answer):
        return value
    return as_protobuf(value) if isinstance(value, bytes) else as_json(value)


def prompt(T: Any) -> Any:
    return T.types.ModelInput.from_ints([1, 2, 3])


def data(T: Any, count: int = 1) -> list[Any]:
    inputs = {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 0.5]}
    return [T.types.Datum(model_input=prompt(T), loss_fn_inputs=inputs)] * count


# name -> the client it needs, and the call.
OPERATIONS: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "sample": ("sampling", lambda T, c: c.sample(prompt(T), 1, T.types.SamplingParams(max_tokens=2))),
    "sample-two": ("sampling", lambda T, c: c.sample(prompt(T), 2, T.types.SamplingParams(max_tokens=2))),
    "compute-logprobs": ("sampling", lambda T, c: c.compute_logprobs(prompt(T))),
    "base-model": ("sampling", lambda T, c: c.get_base_model()),
    "forward": ("training", lambda T, c: c.forward(data(T), "cross_entropy")),
    "forward-backward": ("training", lambda T, c: c.forward_backward(data(T), "cross_entropy")),
    "two-chunks": ("training", lambda T, c: c.forward_backward(data(T, 130), "cross_entropy")),
    "optim-step": ("training", lambda T, c: c.optim_step(T.types.AdamParams())),
    "save-state": ("training", lambda T, c: c.save_state("a")),
    "save-for-sampler": ("training", lambda T, c: c.save_weights_for_sampler("a")),
    "save-ephemeral": ("training", lambda T, c: c.save_weights_and_get_sampling_client()._sampling_session_id),
    "load-state": ("training", lambda T, c: c.load_state(f"tinker://{RUN}/weights/a")),
    "get-info": ("training", lambda T, c: c.get_info()),
    "create-model": ("service", lambda T, c: c.create_lora_training_client("Qwen/Qwen3-8B").model_id),
    "create-sampler": ("service", lambda T, c: c.create_sampling_client(base_model="m")._sampling_session_id),
    "from-state": ("service", lambda T, c: c.create_training_client_from_state(f"tinker://{RUN}/weights/a").model_id),
    "capabilities": ("service", lambda T, c: c.get_server_capabilities()),
    "finish": ("service", lambda T, c: c.create_sampling_client(base_model="m") and c.close("success")),
    "training-run": ("rest", lambda T, c: c.get_training_run(RUN)),
    "training-runs": ("rest", lambda T, c: c.list_training_runs()),
    "checkpoints": ("rest", lambda T, c: c.list_checkpoints(RUN)),
    "user-checkpoints": ("rest", lambda T, c: c.list_user_checkpoints()),
    "delete": ("rest", lambda T, c: c.delete_checkpoint(RUN, "weights/a")),
    "publish": ("rest", lambda T, c: c.publish_checkpoint_from_tinker_path(f"tinker://{RUN}/weights/a")),
    "archive": ("rest", lambda T, c: c.get_checkpoint_archive_url(RUN, "weights/a")),
    "weights-info": ("rest", lambda T, c: c.get_weights_info_by_tinker_path(f"tinker://{RUN}/weights/a")),
    "external-urls": ("rest", lambda T, c: c.get_external_weights_urls(f"tinker://{RUN}/external_weights/a")),
    "session": ("rest", lambda T, c: c.get_session("session-0")),
    "sessions": ("rest", lambda T, c: c.list_sessions()),
    "search": ("rest", lambda T, c: c.search_sessions(T.types.SessionSearchRequest())),
    "trace-export": ("rest", lambda T, c: c.export_session_trace("session-0")),
    "copy": ("rest", lambda T, c: c.copy_weights(f"tinker://{RUN}/weights/a", "project-1")),
    "audit": ("admin", lambda T, c: c.get_audit_log()),
    "billing": ("admin", lambda T, c: c.get_billing_usage("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z")),
    "storage": ("admin", lambda T, c: c.get_current_checkpoint_storage_usage()),
}


def run_variant(
    chosen: Variant, T: Any, server: GoldenServer, version: str, old_service: bool = False
) -> dict[str, Any]:
    """The golden record of a variant: the canned answers, the outcome, how often each scripted endpoint was asked."""
    on, act = OPERATIONS[chosen.operation]
    case = Case(f"answers/{chosen.name}", act, on=on)
    stage = server.stage(case.name, chosen.config, {}, old_service)
    # The client is made before the script is in force, unless the script is about that.
    early = {endpoint: answers for endpoint, answers in chosen.script.items() if endpoint in AT_START}
    stage.script.update({endpoint: list(answers) for endpoint, answers in early.items()})
    with environment({}), contextlib.ExitStack() as closing:
        try:
            client = make_client(T, case, stage.url, closing)
            if not early:
                stage.forget()
                stage.script.update({endpoint: list(answers) for endpoint, answers in chosen.script.items()})
            outcome: dict[str, Any] = {"returned": rendered(play(case, T, client, stage), fields_of(version))}
        except Exception as error:
            outcome = {"raised": rendered_error(error)}
        with stage.changed:
            asked = [request.endpoint for request in stage.requests]
        stage.script.clear()
    answers = {endpoint: [shown(answer) for answer in answers] for endpoint, answers in chosen.script.items()}
    counts = {endpoint: asked.count(endpoint) for endpoint in dict.fromkeys(map(endpoint_of, chosen.script))}
    extra = {"config": chosen.config} if chosen.config else {}
    return {"operation": chosen.operation, **extra, "answers": answers, **outcome, "asked": counts}


def endpoint_of(key: str) -> str:
    return "retrieve_future" if key.startswith("retrieve_future:") else key


AT_START = ("client/config", "client/dynamic_config", "create_session", "auth/token")


def shown(answer: Answer) -> dict[str, Any]:
    """The answer as it stands in the data file; `read_answer` is the way back."""
    out: dict[str, Any] = {"status": answer.status}
    if answer.headers != {"Content-Type": "application/json"}:
        out["headers"] = answer.headers
    try:
        out["body"] = answer.body.decode("ascii")
    except UnicodeDecodeError:
        out["base64"] = base64.b64encode(answer.body).decode()
    if "x-protobuf" in answer.headers.get("Content-Type", "") and "body" in out:
        out["base64"] = base64.b64encode(out.pop("body").encode()).decode()
    return out


def read_answer(value: dict[str, Any]) -> Answer:
    body = base64.b64decode(value["base64"]) if "base64" in value else value["body"].encode()
    return Answer(value["status"], body, value.get("headers", {"Content-Type": "application/json"}))


@functools.cache
def fields_of(version: str) -> dict[str, list[str]]:
    """Type name -> the names by which a program of that release reads its values, as its surface file lists them."""
    path = pathlib.Path(__file__).parent / "surface" / f"{version}.json"
    surface = json.loads(path.read_text())
    described = surface["types"] | {key.rpartition(".")[2]: value for key, value in surface["unexported"].items()}
    table = {}
    for name, description in described.items():
        names = [row["name"] for row in description.get("fields", []) if not row["name"].startswith("_")]
        names += description.get("properties", {})
        # Arrays repeat what the lists say.
        table[name] = [item for item in dict.fromkeys(names) if not item.endswith("_np")]
    return table


def rendered(value: Any, fields: dict[str, list[str]]) -> Any:
    """A result as JSON: a value type becomes {"is": its name, field: value, ...}."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, datetime.datetime):
        return rendered_time(value)
    if isinstance(value, dict):
        # Sorted, because some releases fill their dictionaries from a set.
        return {key: rendered(value[key], fields) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [rendered(item, fields) for item in value]
    name = type(value).__name__
    known = [item for item in fields[name] if hasattr(value, item)]
    return {"is": name} | {item: rendered(getattr(value, item), fields) for item in known}


def rendered_time(value: datetime.datetime) -> str:
    from_now = value.timestamp() - datetime.datetime.now().timestamp() if value.tzinfo else 0
    return "<in 15 minutes>" if 840 < from_now < 960 else value.isoformat()


def rendered_error(error: BaseException) -> dict[str, Any]:
    """The parts of an error that programs look at, and which of the service's words its text repeats."""
    out: dict[str, Any] = {"is": type(error).__name__}
    for name in ("status_code", "body", "request_id", "category"):
        if hasattr(error, name):
            out[name] = rendered(getattr(error, name), {})
    if quoted := [word for word in ("no more", "refused", "Not Found") if word in str(error)]:
        out["quotes"] = quoted
    if error.__cause__ is not None:
        out["cause"] = type(error.__cause__).__name__
    return out
