"""Bodies of the low-level calls equal the recorded ones, for every field absent, null and set.

tinkex has no low-level client: the pure functions that write bodies are compared with the recordings here. What the
clients send is compared in test_requests_match.py, over real HTTP.
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


class LowLevel:
    """Notes what `client.<resource>.<method>(request=...)` would send, in order."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.sent: list[tuple[str, Body]] = []

    def __getattr__(self, resource: str) -> Any:
        return SimpleNamespace(**{method: self.sender(path) for method, path in RESOURCES[resource].items()})

    def sender(self, path: str) -> Any:
        async def send(request: Any) -> None:
            endpoint: Endpoint = getattr(endpoints, path.upper())
            self.sent.append((endpoint.url(), requests.request(request, self.dialect)))

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
        if CASES[name].on == "low_level" and sent and entry["raised"] is None:
            rows.append(pytest.param(version, name, sent, id=f"{version}-{name}"))
    return rows


@pytest.mark.parametrize(("version", "name", "recorded"), comparable())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_our_body_is_the_recorded_one(version: str, name: str, recorded: list[dict[str, Any]]) -> None:
    case = CASES[name]
    client = LowLevel(DIALECTS[version])
    outcome: Any = case.act(T, client)
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


def test_every_low_level_call_has_a_recording() -> None:
    """A call without a recording would compare nothing, and the tests would pass."""
    calls = {getattr(endpoints, path.upper()).url() for paths in RESOURCES.values() for path in paths.values()}
    assert {request["path"] for row in comparable() for request in row.values[2]} == calls
    assert {row.values[0] for row in comparable()} == set(DIALECTS)
