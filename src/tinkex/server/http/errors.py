"""Every error as the HTTP answer it becomes. Nothing else in the service knows a status code by heart.

The body is `{"detail", "code", "category"}`, always with a Content-Length: official clients take a 400 without one for
a proxy's. 409 is never used: they repeat it for minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tinkex.errors import ValidationError
from tinkex.store.errors import DiskFull, Unavailable

logger = logging.getLogger("tinkex.server")


class Refused(Exception):
    """A request that the service will not take, with the reason a person understands and what to do about it."""

    def __init__(
        self, status: int, detail: str, code: str, category: str = "user", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.code, self.category = status, detail, code, category
        self.headers = dict(headers or {})


def not_found(what: str, name: object) -> Refused:
    """The same words whether it does not exist or belongs to somebody else."""
    return Refused(404, f"{what} {str(name)[:200]!r} is not known.", f"unknown_{what.replace(' ', '_')}")


def bad(detail: str, code: str = "bad_request") -> Refused:
    return Refused(400, detail, code)


def busy(detail: str, code: str, retry_after_s: int = 1) -> Refused:
    return Refused(429, detail, code, "server", {"retry-after": str(retry_after_s)})


def answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def as_response(problem: Exception, *, is_openai: bool = False) -> Response:
    """What is answered when a handler raises; OpenAI's clients read another shape."""
    if isinstance(problem, ValidationError):
        problem = bad(str(problem), problem.code)
    if isinstance(problem, (DiskFull, Unavailable)):
        problem = Refused(503, str(problem), "store_unavailable", "server", {"retry-after": "5"})
    if not isinstance(problem, Refused):
        logger.error("a request failed", exc_info=problem)
        problem = Refused(
            500, "The service failed to answer this request; its log says why.", "internal", category="server"
        )
    if is_openai:
        kind = "authentication_error" if problem.status == 401 else "server_error"
        error = {"message": problem.detail, "type": kind, "param": None, "code": problem.code}
        return answer({"error": error}, problem.status, problem.headers)
    body = {"detail": problem.detail, "code": problem.code, "category": problem.category}
    return answer(body, problem.status, problem.headers)


async def handle(request: Request, problem: Exception) -> Response:
    return as_response(problem)
