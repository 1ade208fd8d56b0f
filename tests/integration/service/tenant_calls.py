"""How to call every route of the service with the ids of a tenant, for the tests of isolation.

The routes come from the application itself: one without a row here fails `test_every_route_is_in_the_table`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from starlette.routing import BaseRoute, Route

from tests.integration.service.raw import TOKENS, batch, text
from tinkex.server.app import make_app
from tinkex.server.service import Service

PROMPT: dict[str, Any] = {"prompt": text(TOKENS), "num_samples": 1, "sampling_params": {"max_tokens": 2, "seed": 1}}
Call = tuple[str, str, object]
RouteCalls = dict[str, list[Call]]
"""Route → calls."""


class World(NamedTuple):
    """What a tenant has, by name: the ids that stand in requests."""

    session: str
    run: str
    sampler: str
    operation: str
    sample: str
    state: str = "weights/state"
    lean: str = "sampler_weights/lean"
    external: str = "external_weights/external"

    def path(self, checkpoint: str) -> str:
        return f"tinker://{self.run}/{checkpoint}"

    def address(self, checkpoint: str) -> str:
        return f"training_runs/{self.run}/checkpoints/{checkpoint}"


def service_routes() -> list[BaseRoute]:
    """Return the routes of the real application. It needs no service to be built."""
    parts = SimpleNamespace(config=SimpleNamespace(public_url=None), access=None, ledger=None)
    return make_app(cast(Service, parts)).routes


def route_names(routes: Iterable[BaseRoute]) -> set[str]:
    """Return `METHOD /path` of each route; `* /path` for one that takes every method."""
    names = set()
    for route in routes:
        assert isinstance(route, Route), f"{route} is not a plain route: extend this function"
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        methods = (route.methods or set()) - {"HEAD"}
        names |= {f"* {path}"} if len(methods) > 2 else {f"{method} {path}" for method in methods}
    return names


TRAINING: Mapping[str, dict[str, object]] = {
    "forward": {"forward_input": batch()},
    "forward_backward": {"forward_backward_input": batch()},
    "optim_step": {"adam_params": {}},
    "save_weights": {"path": "x"},
    "save_weights_for_sampler": {"path": "x"},
    "save_weights_external": {"path": "x"},
    "unload_model": {},
}


def named(world: World, own_path: str) -> RouteCalls:
    """Every way to name something of this world. What is another's must be as unknown as what never was."""
    session, run, sampler = world.session, world.run, world.sampler
    in_session = {"session_id": session, "model_seq_id": 9}
    base = {"base_model": "tinkex/tiny"}
    sampling = {**PROMPT, "sampling_session_id": sampler}
    posts: dict[str, list[dict[str, object]]] = {
        "session_heartbeat": [{"session_id": session}],
        "create_model": [{**in_session, **base}],
        "create_sampling_session": [{"session_id": session, "sampling_session_seq_id": 9, **base}],
        "load_weights": [
            {**in_session, "path": own_path, "optimizer": False},
            {"model_id": run, "seq_id": 100, "path": own_path},
        ],
        "copy_weights": [
            {**in_session, "source_path": own_path},
            {"source_path": world.path(world.state)},
            {"source_path": world.path(world.lean)},
            {"source_path": world.path(world.external)},
        ],
        "get_info": [{"model_id": run}],
        "join_sampling_session": [{"sampling_session_id": sampler}],
        "asample": [sampling, {**PROMPT, "model_path": world.path(world.lean)}],
        "sample_stream": [sampling, {**PROMPT, "model_path": world.path(world.lean)}],
        "retrieve_futures": [{"target": {"sampling_session_id": sampler}, "prev_cursor": 0}],
        "retrieve_future": [{"request_id": world.operation}, {"request_id": world.sample}],
        "cancel_future": [{"request_id": world.operation}, {"request_id": world.sample}],
        "weights_info": [{"tinker_path": world.path(saved)} for saved in (world.state, world.lean, world.external)],
        **{name: [{"model_id": run, "seq_id": 100, **body}] for name, body in TRAINING.items()},
    }
    calls: RouteCalls = {
        f"POST /api/v1/{name}": [("POST", name, body) for body in bodies] for name, bodies in posts.items()
    }
    calls |= {
        "GET /api/v1/sessions/{session_id}": [("GET", f"sessions/{session}", None)],
        "POST /api/v1/sessions/{session_id}/finish": [
            ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}})
        ],
        "PUT /api/v1/sessions/{session_id}/project": [("PUT", f"sessions/{session}/project", {"project_id": "p"})],
        "GET /api/v1/sessions/{session_id}/trace_export": [("GET", f"sessions/{session}/trace_export", None)],
        "GET /api/v1/training_runs/{run_id}": [("GET", f"training_runs/{run}", None)],
        "GET /api/v1/training_runs/find": [
            ("GET", f"training_runs/find?run={text}", None) for text in (run, session, world.path(world.state))
        ],
        "PATCH /api/v1/training_runs/{run_id}": [("PATCH", f"training_runs/{run}", {"name": "mine now"})],
        "DELETE /api/v1/training_runs/{run_id}": [
            ("DELETE", f"training_runs/{run}{force}", None) for force in ("", "?force=true")
        ],
        "GET /api/v1/training_runs/{run_id}/checkpoints": [("GET", f"training_runs/{run}/checkpoints", None)],
        "GET /api/v1/training_runs/{run_id}/steps": [("GET", f"training_runs/{run}/steps", None)],
        "POST /api/v1/training_runs/{run_id}/metrics": [
            ("POST", f"training_runs/{run}/metrics", {"entries": [{"metrics": {"reward": 1.0}}]})
        ],
        "GET /api/v1/training_runs/{run_id}/metrics": [("GET", f"training_runs/{run}/metrics", None)],
        "GET /api/v1/training_runs/{run_id}/samples": [("GET", f"training_runs/{run}/samples", None)],
        "GET /api/v1/training_runs/{run_id}/history": [("GET", f"training_runs/{run}/history", None)],
        "GET /api/v1/samplers/{sampler_id}": [("GET", f"samplers/{sampler}", None)],
    }
    for saved in (world.state, world.lean, world.external):
        for route, call in {**reads(world, saved), **changes(world, saved)}.items():
            calls.setdefault(route, []).append(call)
    return calls | openai_calls(world.path(world.lean))


_CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id}"


def reads(world: World, checkpoint: str) -> dict[str, Call]:
    """The calls that others may make once a checkpoint is published."""
    address = world.address(checkpoint)
    return {
        f"GET {_CHECKPOINT}/archive": ("GET", f"{address}/archive", None),
        f"GET {_CHECKPOINT}/external_weights_urls": ("GET", f"{address}/external_weights_urls", None),
    }


def changes(world: World, checkpoint: str) -> dict[str, Call]:
    """The calls that are the owner's alone."""
    address = world.address(checkpoint)
    return {
        f"DELETE {_CHECKPOINT}": ("DELETE", address, None),
        f"POST {_CHECKPOINT}/publish": ("POST", f"{address}/publish", None),
        f"DELETE {_CHECKPOINT}/publish": ("DELETE", f"{address}/publish", None),
        f"PUT {_CHECKPOINT}/ttl": ("PUT", f"{address}/ttl", {"ttl_seconds": 1}),
    }


def openai_calls(path: str) -> RouteCalls:
    chat = {"model": path, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    calls: RouteCalls = {}
    for prefix in ("/v1", "/oai/api/v1"):
        calls |= {
            f"GET {prefix}/models/{{name}}": [("GET", f"{prefix}/models/{path}", None)],
            f"POST {prefix}/completions": [
                (
                    "POST",
                    f"{prefix}/completions",
                    {"model": path, "prompt": "a", "max_tokens": 1, "stream": is_streamed},
                )
                for is_streamed in (False, True)
            ],
            f"POST {prefix}/chat/completions": [("POST", f"{prefix}/chat/completions", chat)],
        }
    return calls


def lists(world: World) -> RouteCalls:
    """Calls whose response shows what the tenant itself has, and nothing of others."""
    paths = (
        "/api/v1/sessions",
        "/api/v1/training_runs",
        "/api/v1/checkpoints",
        "/api/v1/audit",
        "/api/v1/failed_operations",
        "/api/v1/service_state",
        "/api/v1/billing/usage/checkpoints/current",
        "/api/v1/auth/apikey/me",
        "/v1/models",
        "/oai/api/v1/models",
        "/metrics",
    )
    calls: RouteCalls = {f"GET {path}": [("GET", path, None)] for path in paths}
    searches: list[dict[str, object]] = [{}, {"session_id": world.session}]
    return calls | {"POST /api/v1/sessions/search": [("POST", "sessions/search", body) for body in searches]}


def without_ids() -> RouteCalls:
    """Calls that name nothing of a tenant: they describe the service, make something new, or are not offered."""
    calls: dict[str, Call] = {
        "POST /api/v1/client/config": ("POST", "client/config", {"sdk_version": "1"}),
        "POST /api/v1/client/dynamic_config": ("POST", "client/dynamic_config", {}),
        "POST /api/v1/auth/token": ("POST", "auth/token", {}),
        "GET /api/v1/get_server_capabilities": ("GET", "get_server_capabilities", None),
        "POST /api/v1/create_session": ("POST", "create_session", {}),
        "POST /api/v1/telemetry": ("POST", "telemetry", {"events": []}),
        "POST /api/v1/create_custom_loss": ("POST", "create_custom_loss", {}),
        "GET /api/v1/billing/usage/events": ("GET", "billing/usage/events", None),
        "GET /api/v1/tokenizers/{tokenizer}/{file}": ("GET", "tokenizers/tinkex/tiny/tokenizer_config.json", None),
        "DELETE /api/v1/auth/apikey/me": ("DELETE", "auth/apikey/me", None),  # a configured key cannot be revoked
        "POST /api/v1/models": ("POST", "models", {"name": "tinkex/tiny"}),  # the owner's alone, as is the next one
        "DELETE /api/v1/models/{base_model}": ("DELETE", "models/tinkex/tiny", None),
        "POST /api/v1/import_weights": ("POST", "import_weights?base_model=tinkex/tiny&name=x", b"no tar"),
        "* /v1/{rest}": ("POST", "/v1/embeddings", {}),
        "* /oai/api/v1/{rest}": ("POST", "/oai/api/v1/embeddings", {}),
    }
    return {route: [call] for route, call in calls.items()} | without_key()


def without_key() -> RouteCalls:
    """Calls that need no key: the health of the service, the console's own files, and links that carry a signature."""
    paths = {
        "/": "/",
        "/console": "/console",
        "/console/": "/console/",
        "/console/{name}": "/console/main.js",
        "/livez": "/livez",
        "/readyz": "/readyz",
        "/api/v1/healthz": "/api/v1/healthz",
        "/api/v1/files/{token}/{name}": "/api/v1/files/forged/archive.tar",
    }
    return {f"GET {route}": [("GET", path, None)] for route, path in paths.items()}


def all_calls(world: World, own_path: str = "tinker://x/weights/y") -> RouteCalls:
    return {**named(world, own_path), **lists(world), **without_ids()}
