"""Turns errors into HTTP responses. Only this module and `openai.errors` choose the status code of an exception.

The body is `{"detail", "code", "category"}`, always with a Content-Length: official clients treat a 400 without one as
a proxy's. 409 is used only where they never come (`RunInUse`): they retry it for minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from tinkex.errors import ValidationError
from tinkex.server.upkeep.checksums import DamagedCheckpoint
from tinkex.store.disk import is_full
from tinkex.store.errors import BucketAway, DamagedBlob, DiskFull, HomeLost, LeaseLost, RunDeleted, Unavailable

logger = logging.getLogger("tinkex.server")


class RequestRejected(Exception):
    """A request that the service does not accept: the status, the reason in plain words, and what to do about it."""

    def __init__(
        self, status: int, detail: str, code: str, category: str = "user", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.code, self.category = status, detail, code, category
        self.headers = dict(headers or {})


def not_found(noun: str, name: object) -> RequestRejected:
    """Return a 404. The message is the same whether the object does not exist or belongs to another tenant."""
    return RequestRejected(404, f"{noun} {str(name)[:200]!r} is not known.", f"unknown_{noun.replace(' ', '_')}")


def bad_request(detail: str, code: str = "bad_request") -> RequestRejected:
    return RequestRejected(400, detail, code)


def too_many_requests(detail: str, code: str, retry_after_s: int = 1) -> RequestRejected:
    return RequestRejected(429, detail, code, "server", {"retry-after": str(retry_after_s)})


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


def as_rejected(error: Exception) -> RequestRejected:
    """Return the rejection to report for any exception. One that was not expected is logged and becomes a 500."""
    match error:
        case RequestRejected():
            return error
        case ValidationError():
            return bad_request(str(error), error.code)
        case DiskFull() | Unavailable() | BucketAway() | LeaseLost():
            return RequestRejected(503, str(error), "store_unavailable", "server", {"retry-after": "5"})
        case RunDeleted():
            return RequestRejected(404, str(error), "unknown_training_run")
        case HomeLost():
            return RequestRejected(503, str(error), "not_at_home", "server", {"retry-after": "1"})
        case DamagedCheckpoint() | DamagedBlob():
            logger.error("%s", error)
            # Another attempt would read the same bytes.
            return RequestRejected(500, str(error), "damaged_checkpoint", "server", {"x-should-retry": "false"})
    if is_full(error):  # a file, not a row
        return as_rejected(DiskFull())
    logger.error("a request failed", exc_info=error)
    return RequestRejected(500, "The service failed to process this request; its log says why.", "internal", "server")


def error_response(error: Exception) -> Response:
    rejected = as_rejected(error)
    body = {"detail": rejected.detail, "code": rejected.code, "category": rejected.category}
    return json_response(body, rejected.status, rejected.headers)
