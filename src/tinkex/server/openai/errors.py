"""Errors in the form that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import Response

from tinkex.engine.contract import EngineDied, EngineFault
from tinkex.server.http.errors import RequestRejected, as_rejected, bad_request, json_response

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class BadField(RequestRejected):
    """A field whose value is wrong or not supported. OpenAI's error names it as `param`."""

    def __init__(self, param: str, reason: str, code: str = "invalid_value") -> None:
        super().__init__(400, f"{param}: {reason}", code)
        self.param = param


def openai_error_response(error: Exception) -> Response:
    """Return the response for an exception that a handler of the OpenAI-compatible API raised."""
    rejected = rejection_of(error)
    return json_response(error_body(rejected), rejected.status, rejected.headers)


def rejection_of(error: Exception) -> RequestRejected:
    """Return the rejection to report for any exception, those of the engine included."""
    match error:
        case RequestRejected(code="unknown_base_model" | "unknown_checkpoint"):
            return RequestRejected(404, error.detail, "model_not_found")
        case EngineFault(category="user"):
            return bad_request(str(error), "invalid")
        case EngineFault():
            return RequestRejected(500, str(error), "engine_failed", "server")
        case EngineDied():
            detail = "The engine died and is being started again. Retry in a moment."
            return RequestRejected(503, detail, "engine_restarting", "server", {"retry-after": "2"})
    return as_rejected(error)


def error_body(rejected: RequestRejected) -> dict[str, Any]:
    kind = _TYPES.get(rejected.status, "invalid_request_error" if rejected.status < 500 else "server_error")
    param = rejected.param if isinstance(rejected, BadField) else None
    if rejected.code == "model_not_found":
        param = "model"
    return {"error": {"message": rejected.detail, "type": kind, "param": param, "code": rejected.code}}
