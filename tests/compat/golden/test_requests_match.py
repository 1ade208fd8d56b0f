"""Our client, driven through the very calls that the official releases were recorded with, sends what they sent.

Every case of every endpoint and optional field, over real HTTP: 0.36.0 against a service of today, 0.4.1 against one
that knows no `client/config`. Where we differ on purpose, `DEPARTURES` says why; a departure that is none fails too.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.compat.golden.case import Case, run_case
from tests.compat.golden.cases import cases_for
from tests.compat.golden.server import GoldenServer
from tinkex.client._runtime import session

HERE = Path(__file__).parent
VERSIONS = ("0.4.1", "0.36.0")
RECORDED = {
    version: json.loads((HERE / "requests" / f"{version}.json").read_text())["requests"] for version in VERSIONS
}

REFUSED = "refused before it is sent: no service could use it"
TAKEN = "taken: unsigned, boolean and nested data have one meaning"
OURS = {
    "copy-weights/without-project": "a service without projects copies into the session",
    "custom-loss/client-side": "losses traced for the service are refused by name",
    "custom-loss/server-side": "losses traced for the service are refused by name",
    "forward-backward/no-loss-inputs": REFUSED,
    "forward-backward/numpy-bool-weights": TAKEN,
    "forward-backward/numpy-uint8-float32": TAKEN,
    "forward-backward/torch-bool-weights": TAKEN,
    "forward-backward/unknown-key-numpy": REFUSED,
    "rest/checkpoint/copy-without-project": "a service without projects needs none",
    "sample/empty-prompt": REFUSED,
    "sample/params-unknown-field": "the penalties are parameters of ours",
    "sampler/get-base-model": "known already: not asked again",
    "session/tags-empty": "an empty TINKER_TAGS holds no tag",
}
DEPARTURES = {(version, name): reason for name, reason in OURS.items() for version in VERSIONS} | {
    ("0.36.0", "forward-backward/nan-weight"): REFUSED,
    ("0.36.0", "forward-backward/torch-uint8-float32"): TAKEN,
    ("0.36.0", "optim-step/dict"): "a plain dict of parameters is taken",
    ("0.4.1", "forward-backward/int-weights"): "float32 numbers are written as floats",
    ("0.4.1", "forward-backward/loss-a-loss-nobody-knows"): "the service knows its losses, not the client",
    ("0.4.1", "forward-backward/nested-lists"): TAKEN,
    ("0.4.1", "forward-backward/no-datums"): REFUSED,
    ("0.4.1", "forward-backward/tensor-data-shape-none"): "no shape is no key, however it was not given",
    ("0.4.1", "rest/training-run/by-external-path"): "external_weights is a kind of today's services",
    ("0.4.1", "session/key-passed-and-in-env"): "an argument beats the environment",
    ("0.4.1", "forward-backward-custom/2d"): "the shape of 2-D weights is kept",
    ("0.4.1", "forward-backward-custom/extra-inputs"): "a service's loss is sent only the inputs that it knows",
    ("0.4.1", "forward-backward-custom/targets-only"): "absent weights are zeros, as in 0.36.0",
    ("0.4.1", "sample/429-then-done"): "one logical sample keeps its seq_id, as in 0.36.0",
    ("0.4.1", "sample/500-then-done"): "one logical sample keeps its seq_id, as in 0.36.0",
    ("0.4.1", "rest/first-requests"): "no session is opened for reading",
    ("0.4.1", "rest/from-service"): "no session is opened for reading",
}


def all_cases() -> list[Any]:
    return [
        pytest.param(version, case, id=f"{version}-{case.name}")
        for version in VERSIONS
        for case in cases_for(version)
        # Low-level calls are held against our bodies in test_bodies_match.py; telemetry has events of our own, which
        # tests/integration/client/test_secrets.py holds to their promises.
        if case.on != "low_level" and not case.name.startswith("telemetry/")
    ]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, GoldenServer]]:
    """One address per release: what a client has learned about a service, it keeps."""
    with GoldenServer() as old, GoldenServer() as new:
        yield {"0.4.1": old, "0.36.0": new}


@pytest.mark.parametrize(("version", "case"), all_cases())
def test_our_requests_are_the_recorded_ones(
    version: str, case: Case, servers: dict[str, GoldenServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.5)
    if case.needs_torch:
        pytest.importorskip("torch")
    recorded = RECORDED[version][case.name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = run_case(case, tinkex, servers[version], old_service=version == "0.4.1")
    same = comparable(ours, case) == comparable(recorded, case)
    if (version, case.name) in DEPARTURES:
        assert not same, "no departure any more: take it off the list"
    else:
        assert comparable(ours, case) == comparable(recorded, case)


def comparable(record: dict[str, Any], case: Case) -> tuple[bool, list[dict[str, Any]]]:
    sent = [plain(request) for request in record["requests"] if is_asked_for(request, case)]
    return record["raised"] is None, sent


def is_asked_for(request: dict[str, Any], case: Case) -> bool:
    """Not what we ask on our own account: the dialect of an old service, and once how long prompts may be."""
    if request["path"].endswith("/client/config") and "0.36.0" not in case.versions:
        return False
    if request["path"].endswith("/client/config"):
        return "session" not in case.name and "rest" not in case.name
    return "get_server_capabilities" not in request["path"] or "capabilities" in case.name


KEPT = ("content-type", "content-encoding", "x-api-key", "x-tinker-request-type", "x-tinker-request-iteration",
        "x-tinker-sampling-backpressure", "x-tinker-weights-access-token", "cf-access-client-id",
        "cf-access-client-secret")  # fmt: skip


def plain(request: dict[str, Any]) -> dict[str, Any]:
    headers = {name: value for name, value in request["headers"].items() if name in KEPT}
    if request["method"] == "GET" or not (request.get("body") or request.get("protobuf")):
        headers.pop("content-type", None)
    wants_binary = "x-protobuf" in request["headers"].get("accept", "")
    body = request.get("protobuf") or spelled(request.get("body", ""))
    place = {name: request[name] for name in ("method", "path")}
    return {**place, "headers": headers, "proto": wants_binary, "body": body}


def spelled(text: str) -> str:
    """Both spellings of an exponent, and the release that speaks, are the same to a service."""
    text = re.sub(r'"sdk_version":"[\d.]+"', '"sdk_version":"<release>"', text)
    return re.sub(r"e-0(\d)", r"e-\1", text)
