"""Turn requests into golden records: what varies between runs becomes a <mark>, everything else stays exact."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from . import canned, protobuf
from .canned import Request
from .server import decompressed

API_KEY = "tml-golden"
WEIGHTS_TOKEN = "tml-weights-token"
# Sent in the background at times of their own; recorded only by the cases that are about them.
BACKGROUND = ("session_heartbeat", "telemetry")
# How a client introduces itself; recorded by the cases that record from the start.
PREAMBLE = ("client/config", "client/dynamic_config", "auth/token", "create_session")
KEPT_HEADERS = re.compile(
    r"accept|authorization|content-(type|encoding)|user-agent|x-(api|idempotency)-key|(x-tinker|x-sdk|cf)-.*"
)
UUID = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")
SECRETS = {API_KEY: "<key>", WEIGHTS_TOKEN: "<weights token>", canned.jwt(): "<jwt>"}
# Keys of telemetry events whose values depend on the clock, on the installation, or on the package's wording.
VOLATILE = {
    "detail",
    "duration",
    "error_message",
    "exception",
    "message",
    "elapsed_time",
    "current_time",
    "start_time",
    "exception_stack",
    "func",
    "platform",
    "timestamp",
    "traceback",
}


def record(request: Request) -> dict[str, Any]:
    """One request as it is kept in the data file; keys of JSON bodies keep the order in which they were sent."""
    headers = {
        name: header(name, value) for name, value in sorted(request.headers.items()) if KEPT_HEADERS.fullmatch(name)
    }
    path = f"/api/v1/{request.endpoint}" + (f"?{request.query}" if request.query else "")
    out: dict[str, Any] = {"method": request.method, "path": path, "headers": headers}
    if headers.get("content-type") == canned.PROTOBUF:
        body = decompressed(request).body
        out["protobuf"] = base64.b64encode(protobuf.canonical("ForwardBackwardRequest", body)).decode()
        out["decoded"] = protobuf.decode("ForwardBackwardRequest", body)
    elif request.body:
        out["body"] = body_text(request)
    return out


def header(name: str, value: str) -> str:
    if name == "x-tinker-create-promise-roundtrip-time":
        return "<seconds>"
    return UUID.sub("<uuid>", SECRETS.get(value, value))


def mark_repeats(requests: list[Request]) -> list[Request]:
    """Say `again` where an idempotency key is that of an earlier request."""
    seen: set[str] = set()
    out = []
    for request in requests:
        key = request.headers.get("x-idempotency-key")
        headers = request.headers | {"x-idempotency-key": f"{key} again"} if key in seen else request.headers
        seen |= {key} if key else set()
        out.append(Request(request.method, request.endpoint, request.query, headers, request.body))
    return out


def body_text(request: Request) -> str:
    text = request.body.decode()
    if request.endpoint == "telemetry":
        return json.dumps(steady(json.loads(text)), separators=(",", ":"), ensure_ascii=False)
    if request.endpoint == "create_session":
        # Tags come out of a set, in the order of their hashes.
        body = json.loads(text)
        if len(body["tags"]) > 1:
            text = json.dumps({**body, "tags": sorted(body["tags"])}, separators=(",", ":"), ensure_ascii=False)
    return UUID.sub("<uuid>", text)


def steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: f"<{k}>" if k in VOLATILE else steady(v) for k, v in value.items()}
    if isinstance(value, list):
        return [steady(item) for item in value]
    if isinstance(value, str):
        for secret, mark in SECRETS.items():
            value = value.replace(secret, mark)
        return UUID.sub("<uuid>", re.sub(r"http://127\.0\.0\.1:\d+/[^/\s]+", "<base url>", value))
    return value


def merged_telemetry(requests: list[Request]) -> list[Request]:
    """All batches as one: how events fall into batches depends on timing."""
    batches = [request for request in requests if request.endpoint == "telemetry"]
    if len(batches) < 2:
        return requests
    bodies = [request.json() for request in batches]
    events = sorted((event for body in bodies for event in body["events"]), key=lambda e: e["event_session_index"])
    one = Request("POST", "telemetry", "", batches[0].headers, json.dumps({**bodies[0], "events": events}).encode())
    return [request for request in requests if request.endpoint != "telemetry"] + [one]
