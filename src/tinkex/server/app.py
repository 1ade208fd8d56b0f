"""The ASGI application: every endpoint of `wire.endpoints` with its handler, OpenAI routes, console, metrics, keys."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex.server.http.access import AccessMiddleware
from tinkex.server.http.errors import RequestRejected, error_response, json_response
from tinkex.server.http.metrics import metrics_page
from tinkex.server.openai import routes as openai
from tinkex.server.routes import (
    account,
    checkpoints,
    console,
    files,
    futures,
    insight,
    runs,
    sampling,
    sessions,
    training,
)
from tinkex.server.service import Service
from tinkex.wire import endpoints

Handler = Callable[[Request], Awaitable[Response]]

ROOMS = (training, futures, sampling, sessions, runs, checkpoints, files, account, insight)
HOT = ("retrieve_future", "asample", "forward_backward", "optim_step", "forward", "session_heartbeat")
"""Looked for first: routes are tried in order."""


def handler_of(endpoint: endpoints.Endpoint) -> Handler:
    """The function that has the endpoint's name, in whichever room it is."""
    found = [getattr(room, endpoint.name) for room in ROOMS if hasattr(room, endpoint.name)]
    if len(found) != 1:
        raise LookupError(f"{endpoint.name} has {len(found)} handlers")
    handler: Handler = found[0]
    return handler


def routes() -> list[Route]:
    """One route per row of the table; longer paths first, because `{checkpoint_id:path}` swallows slashes."""
    rows = sorted(endpoints.ALL, key=lambda row: (row.name not in HOT, -len(row.path)))
    return [Route(_path(row.path), guarded(row.name, handler_of(row)), methods=[row.method]) for row in rows]


def _path(path: str) -> str:
    return re.sub(r"\{(checkpoint_id|tokenizer)\}", r"{\1:path}", path)


def guarded(name: str, handler: Handler) -> Handler:
    """Whatever a handler raises becomes an answer; everything is counted."""

    async def run(request: Request) -> Response:
        service: Service = request.app.state.service
        started = service.clock.now()
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as problem:
            response = error_response(problem)
        tenant = getattr(request.state, "tenant", None)
        service.metrics.request(name, response.status_code, service.clock.now() - started, tenant)
        return response

    return run


async def no_such_call(request: Request, problem: Exception) -> Response:
    detail = (
        f"There is no {request.method} {request.url.path} here. This is tinkex; the API is under /api/v1, "
        "the OpenAI-compatible one under /v1."
    )
    return error_response(RequestRejected(404, detail, "unknown_endpoint"))


async def no_such_method(request: Request, problem: Exception) -> Response:
    detail = f"{request.url.path} does not take {request.method}."
    return error_response(RequestRejected(405, detail, "wrong_method"))


async def root(request: Request) -> Response:
    """The console for browsers; for programs, what this is."""
    if console.wants_page(request):
        return await console.page(request)
    base = str(request.base_url).rstrip("/")
    told = {"service": "tinkex", "api": f"{base}/api/v1", "openai": f"{base}/v1", "metrics": f"{base}/metrics"}
    return json_response(told, headers={"vary": "Accept"})


class PrefixMiddleware:
    """Behind a proxy that passes its path prefix on: what stands before our own paths is not ours to look at."""

    def __init__(self, app: ASGIApp, public_url: str | None) -> None:
        self._app, self._prefix = app, urlsplit(public_url or "").path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._prefix and scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._prefix}/"):
            scope["root_path"] = self._prefix
            if scope["path"] == self._prefix:  # the console's parts are named relative to the slash
                await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(service: Service) -> Starlette:
    app = Starlette(
        routes=[
            *routes(),
            *files.ROUTES,
            *openai.ROUTES,
            *console.ROUTES,
            Route("/metrics", guarded("metrics", metrics_page)),
            Route("/", root),
        ],
        middleware=[
            Middleware(PrefixMiddleware, public_url=service.config.public_url),
            Middleware(AccessMiddleware, access=service.access),
        ],
        exception_handlers={404: no_such_call, 405: no_such_method},
    )
    app.state.service = service
    return app
