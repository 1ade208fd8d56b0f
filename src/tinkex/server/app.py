"""Builds the ASGI application: the API, the OpenAI-compatible API, the console, the metrics, and the check of keys."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex.server.http.access import AccessMiddleware
from tinkex.server.http.errors import RequestRejected, error_response, json_response
from tinkex.server.http.requests import guarded
from tinkex.server.openai import routes as openai
from tinkex.server.openai.errors import openai_error_response
from tinkex.server.routes import console, health
from tinkex.server.routes.metrics import metrics
from tinkex.server.routes.table import api_routes
from tinkex.server.service import Service


def make_app(service: Service, *inner: Middleware) -> Starlette:
    """`inner`: what a request passes through once its tenant is known, before its handler."""
    app = Starlette(
        routes=[
            *api_routes(),
            *openai.ROUTES,
            *console.ROUTES,
            *health.ROUTES,
            Route("/metrics", guarded("metrics", metrics)),
            Route("/", root),
        ],
        middleware=[
            Middleware(PrefixMiddleware, public_url=service.config.public_url),
            Middleware(
                AccessMiddleware,
                access=service.access,
                ledger=service.ledger,
                openai_error_response=openai_error_response,
            ),
            *inner,
        ],
        exception_handlers={404: unknown_endpoint, 405: wrong_method},
    )
    app.state.service = service
    return app


async def root(request: Request) -> Response:
    """Return the console to browsers, and to programs the addresses of the APIs."""
    if console.wants_page(request):
        return await console.page(request)
    base = str(request.base_url).rstrip("/")
    addresses = {"service": "tinkex", "api": f"{base}/api/v1", "openai": f"{base}/v1", "metrics": f"{base}/metrics"}
    return json_response(addresses, headers={"vary": "Accept"})


async def unknown_endpoint(request: Request, error: Exception) -> Response:
    detail = (
        f"There is no {request.method} {request.url.path} here. This is tinkex; the API is under /api/v1, "
        "the OpenAI-compatible one under /v1."
    )
    return error_response(RequestRejected(404, detail, "unknown_endpoint"))


async def wrong_method(request: Request, error: Exception) -> Response:
    detail = f"{request.url.path} does not support {request.method}."
    return error_response(RequestRejected(405, detail, "wrong_method"))


class PrefixMiddleware:
    """Removes the path of `public_url` from requests, for a reverse proxy that passes its path prefix on."""

    def __init__(self, app: ASGIApp, public_url: str | None) -> None:
        self._app, self._prefix = app, urlsplit(public_url or "").path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._prefix and scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._prefix}/"):
            scope["root_path"] = self._prefix
            if scope["path"] == self._prefix:  # the console's files are named relative to the slash
                await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
                return
        await self._app(scope, receive, send)
