"""Writes docs/openapi.json from the table of endpoints and the annotations of `tinkex.types`. `--check` only compares.

Not served: the document is the same for every service of a release, and a route without a key is one more to guard.
"""

from __future__ import annotations

import argparse
import datetime as dt
import enum
import json
import re
import sys
import types as pytypes
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tinkex.types
from tinkex._version import __version__
from tinkex.types import account, futures, inputs, sampling, session, telemetry, training, weights
from tinkex.types.base import REQUIRED, Value
from tinkex.wire import endpoints
from tinkex.wire.endpoints import Endpoint

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "openapi.json"
JSON, PROTOBUF = "application/json", "application/x-protobuf"
Schema = dict[str, Any]

BODIES: dict[str, type[Value] | None] = {
    "client_config": account.ClientConfigRequest,
    "client_dynamic_config": None,
    "auth_token": None,
    "create_session": session.CreateSessionRequest,
    "session_heartbeat": session.SessionHeartbeatRequest,
    "finish_session": session.ClientSessionFinished,
    "create_sampling_session": session.CreateSamplingSessionRequest,
    "join_sampling_session": session.JoinSamplingSessionRequest,
    "telemetry": telemetry.TelemetrySendRequest,
    "create_model": training.CreateModelRequest,
    "unload_model": weights.UnloadModelRequest,
    "get_info": account.GetInfoRequest,
    "forward": training.ForwardRequest,
    "forward_backward": training.ForwardBackwardRequest,
    "optim_step": training.OptimStepRequest,
    "create_custom_loss": None,
    "save_weights": weights.SaveWeightsRequest,
    "save_weights_for_sampler": weights.SaveWeightsForSamplerRequest,
    "save_weights_external": weights.SaveWeightsExternalRequest,
    "load_weights": weights.LoadWeightsRequest,
    "asample": sampling.SampleRequest,
    "sample_stream": sampling.SampleRequest,
    "retrieve_future": futures.FutureRetrieveRequest,
    "retrieve_futures": futures.FuturesRetrieveRequest,
    "cancel_future": futures.FutureRetrieveRequest,
    "publish_checkpoint": None,
    "set_checkpoint_ttl": None,
    "weights_info": None,
    "copy_weights": weights.CopyWeightsRequest,
    "set_session_project": None,
    "log_metrics": None,
    "offer_model": None,
    "search_sessions": session.SessionSearchRequest,
    "update_training_run": account.UpdateTrainingRunRequest,
}
"""The body of every POST, PUT and PATCH. One that is missing here stops this script."""

OWN_BODIES: dict[str, Schema] = {
    "offer_model": {"properties": {"name": {"type": "string"}}, "required": ["name"]},
    "set_checkpoint_ttl": {"properties": {"ttl_seconds": {"type": ["integer", "null"]}}},
    "weights_info": {"properties": {"tinker_path": {"type": "string"}}, "required": ["tinker_path"]},
    "log_metrics": {
        "properties": {
            "entries": {"type": "array", "items": {"type": "object"}},
            "samples": {"type": "array", "items": {"type": "object"}},
        }
    },
    "set_session_project": {"properties": {"project_id": {"type": "string"}}, "required": ["project_id"]},
}
_PAGE = {"offset": "integer", "limit": "integer"}
QUERIES: dict[str, dict[str, str]] = {
    "list_training_runs": {
        **_PAGE,
        **dict.fromkeys(("project_id", "q", "status", "tag", "base_model", "archived", "order"), "string"),
        "brief": "boolean",
    },
    "find_training_run": {"run": "string"},
    "delete_training_run": {"force": "boolean"},
    "list_user_checkpoints": _PAGE,
    "list_sessions": _PAGE,
    "failed_operations": {**_PAGE, "run_id": "string"},
    "run_metrics": {"after": "integer", "most": "integer"},
    "run_samples": {"after": "integer", "most": "integer"},
    "run_history": {"format": "string"},
    "run_steps": {"after_seq_id": "integer", "before_seq_id": "integer", "most_steps": "integer", "only": "string"},
    "audit_log": {"day": "string", "event_type": "string"},
    "checkpoint_storage_usage": {"project_id": "string"},
}
STREAMS = {
    "sample_stream": "text/event-stream",
    "tokenizer_file": "application/octet-stream",
    "run_history": "text/csv",
}
NOT_OFFERED = {"auth_token", "create_custom_loss", "billing_usage"}
"""Known to clients, and always rejected here with a sentence."""


def document() -> Schema:
    schemas = Schemas()
    paths: dict[str, Schema] = {}
    for endpoint in sorted(endpoints.ALL, key=lambda row: (row.path, row.method)):
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    paths |= _openai(schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tinkex",
            "version": __version__,
            "description": "The Tinker API as `tinkex serve` offers it. Passes also travel as protobuf: "
            "src/tinkex/wire/tinkex.proto.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
            "schemas": dict(sorted(schemas.named.items())),
        },
    }


def _operation(endpoint: Endpoint, schemas: Schemas) -> Schema:
    name = endpoint.name
    operation: Schema = {"operationId": name}
    parameters = [
        {"name": part, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for part in re.findall(r"\{(\w+)\}", endpoint.path)
    ]
    parameters += [
        {"name": word, "in": "query", "schema": {"type": kind}} for word, kind in QUERIES.get(name, {}).items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.method in ("POST", "PUT", "PATCH"):
        kind = BODIES[name]
        schema = {"type": "object", **OWN_BODIES.get(name, {})} if kind is None else schemas.of(kind)
        operation["requestBody"] = {"content": {JSON: {"schema": schema}}}
    if name == "healthz":
        operation["security"] = []
    operation["responses"] = _responses(endpoint, schemas)
    return operation


def _responses(endpoint: Endpoint, schemas: Schemas) -> Schema:
    problem = {"description": "Rejected; `detail` says why.", "content": {JSON: {"schema": schemas.problem()}}}
    responses: Schema = {"4XX": problem, "503": problem}
    name = endpoint.name
    if name in NOT_OFFERED:
        return responses
    if name == "checkpoint_archive":
        return {"302": {"description": "To a signed link."}, **responses}
    if name in STREAMS:
        content: Schema = {STREAMS[name]: {}}
    elif name == "retrieve_future":
        content = {JSON: {"schema": {"type": "object"}}, PROTOBUF: {}}
    elif endpoint.is_future:
        content = {JSON: {"schema": schemas.of(futures.UntypedAPIFuture)}}
    elif endpoint.answer:
        content = {JSON: {"schema": schemas.of(_type_named(endpoint.answer))}}
    else:
        content = {JSON: {}}
    return {"200": {"description": "Done.", "content": content}, **responses}


def _type_named(name: str) -> type[Value]:
    modules = (tinkex.types, account, futures, inputs, sampling, session, telemetry, training, weights)
    [kind] = {getattr(module, name) for module in modules if hasattr(module, name)}
    return typing.cast(type[Value], kind)


def _openai(schemas: Schemas) -> dict[str, Schema]:
    """The three calls of OpenAI's API, as far as they are used: what is not named here is passed over or rejected."""
    error = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
    answers = {"4XX": {"description": "Rejected.", "content": {JSON: {"schema": error}}}}
    answers["503"] = answers["4XX"]
    done: Schema = {"description": "Done.", "content": {JSON: {"schema": {"type": "object"}}, "text/event-stream": {}}}
    common: Schema = {
        "model": {"type": "string"},
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 16},
        "temperature": {"type": "number"},
        "top_p": {"type": "number"},
        "n": {"type": "integer"},
        "seed": {"type": "integer"},
        "stream": {"type": "boolean"},
        "stop": {"type": ["string", "array", "null"], "items": {"type": "string"}},
    }
    message = {
        "type": "object",
        "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
        "required": ["role", "content"],
    }

    def call(name: str, **own: Schema) -> Schema:
        body = {"type": "object", "properties": {**common, **own}, "required": ["model", *own]}
        content = {JSON: {"schema": body}}
        return {
            "post": {"operationId": name, "requestBody": {"content": content}, "responses": {"200": done, **answers}}
        }

    listed = {"description": "Done.", "content": {JSON: {"schema": {"type": "object"}}}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/models": {"get": {"operationId": "openai_models", "responses": {"200": listed, **answers}}},
        "/v1/models/{name}": {
            "get": {"operationId": "openai_model", "parameters": [name], "responses": {"200": listed, **answers}}
        },
        "/v1/completions": call("openai_completions", prompt={"type": ["string", "array"]}),
        "/v1/chat/completions": call("openai_chat", messages={"type": "array", "items": message}),
    }


class Schemas:
    """JSON schemas of types. Every class stands once, under its name."""

    def __init__(self) -> None:
        self.named: dict[str, Schema] = {}

    def of(self, hint: Any) -> Schema:
        """Return the schema of an annotation."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.of(arguments[0])
        if origin is typing.Literal:
            return {"enum": list(arguments)}
        if origin in (typing.Union, pytypes.UnionType):
            return {"anyOf": [self.of(arm) for arm in arguments]}
        if origin in (list, Sequence):
            return {"type": "array", "items": self.of(arguments[0])}
        if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if origin is tuple:
            return {"type": "array", "prefixItems": [self.of(arm) for arm in arguments], "minItems": len(arguments)}
        if isinstance(hint, type) and issubclass(hint, Value):
            return self._value(hint)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return {"type": "string"}
        return dict(_SCALARS.get(hint, {}))

    def _value(self, kind: type[Value]) -> Schema:
        if kind.__name__ not in self.named:
            self.named[kind.__name__] = {}  # a type may hold itself
            hints = typing.get_type_hints(kind, include_extras=True)
            fields = {field: self.of(hints[field]) for field in kind._defaults}
            schema: Schema = {"type": "object", "properties": fields}
            if required := [field for field, default in kind._defaults.items() if default is REQUIRED]:
                schema["required"] = required
            self.named[kind.__name__] = schema
        return {"$ref": f"#/components/schemas/{kind.__name__}"}

    def problem(self) -> Schema:
        texts = {name: {"type": "string"} for name in ("detail", "code", "category")}
        self.named["Problem"] = {"type": "object", "properties": texts, "required": list(texts)}
        return {"$ref": "#/components/schemas/Problem"}


_SCALARS: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    bytes: {"type": "string", "contentEncoding": "base64"},
    dt.datetime: {"type": "string", "format": "date-time"},
    type(None): {"type": "null"},
}


def text() -> str:
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args(words).check
    if not is_check:
        DOCUMENT.write_text(text(), encoding="utf-8")
    elif not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != text():
        print("docs/openapi.json is not up to date: run python scripts/make_openapi.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
