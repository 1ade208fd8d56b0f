"""Requests as the scripted service received them, and its responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

import orjson

from tinkex.clock import REAL
from tinkex.testing.http import codec
from tinkex.wire import body as wire_body
from tinkex.wire import json_codec

if TYPE_CHECKING:
    from tinkex.testing.script import Twist

PROTOBUF = "application/x-protobuf"


class Request:
    """One request. `service.requests` holds them in the order of arrival.

    `endpoint` is the name in `tinkex.wire.endpoints` ("" if no row fits), `parts` what its path's placeholders held,
    `status` the status answered so far (None: no response yet, or the connection was dropped), `connection` the number
    of the connection it came on, `headers` have lower-case names, `time` is `tinkex.clock`'s monotonic one.
    """

    def __init__(self, method: str, target: str, headers: dict[str, str], connection: int = 0) -> None:
        path, _, query = target.partition("?")
        self.method = method
        self.path = unquote(path)
        self.query: dict[str, str] = dict(parse_qsl(query, keep_blank_values=True)) if query else {}
        self.headers = headers
        self.connection = connection
        self.body = b""
        self.time = REAL.now()
        self.endpoint = ""
        self.parts: dict[str, str] = {}
        self.twists: tuple[Twist, ...] = ()
        self.status: int | None = None

    def __repr__(self) -> str:
        return f"<{self.method} {self.path} {len(self.body)} bytes → {self.status}>"

    @property
    def content(self) -> bytes:
        """The body, unpacked if the client compressed it."""
        return wire_body.decompress(self.body, self.headers.get("content-encoding"))

    @property
    def is_protobuf(self) -> bool:
        return PROTOBUF in self.headers.get("content-type", "")

    @property
    def wants_protobuf(self) -> bool:
        return PROTOBUF in self.headers.get("accept", "")

    @property
    def json(self) -> Any:
        """The body read as JSON, anew each time: thousands of remembered requests would hold millions of numbers."""
        return json_codec.decode(self.content) if self.body else {}

    @property
    def summary(self) -> dict[str, Any]:
        """The body's fields, with training data counted instead of listed: the same in both dialects."""
        body = codec.training_from_protobuf(self.content) if self.is_protobuf else self.json
        given = body.get("forward_input") or body.get("forward_backward_input")
        if given is None:
            return dict(body)
        shared = {"model_id": body.get("model_id"), "seq_id": body.get("seq_id"), "loss_fn": given.get("loss_fn")}
        return {**shared, "forward_only": "forward_input" in body, "datums": len(given["data"])}


@dataclass(slots=True)
class Response:
    """One answer. `cut` breaks the connection off half way through the body."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] | None = None
    stream: AsyncIterator[bytes] | None = None
    cut: bool = False


# None: no response at all, the connection is reset.
Reply = Response | None


def json_response(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, orjson.dumps(value), headers=headers)


class Refused(Exception):
    """A response other than success: decided anywhere, written by the service."""

    def __init__(self, status: int, detail: str, code: str) -> None:
        super().__init__(detail)
        self.response = json_response(status, {"detail": detail, "code": code, "category": "user"})
