"""The type of a route handler, and the wrapper that every handler runs in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tinkex.server.http.errors import error_response
from tinkex.server.http.requests import service_of

Handler = Callable[[Request], Awaitable[Response]]

CLIENT_CLOSED_REQUEST: Final = 499
"""The status, known from nginx, for a client that hung up. Only the metrics see it."""


def guarded(name: str, handler: Handler, to_response: Callable[[Exception], Response] = error_response) -> Handler:
    """Wrap a handler: exceptions become responses, and every request is counted under `name` in the metrics."""

    async def run(request: Request) -> Response:
        service = service_of(request)
        started = service.clock.now()
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:  # an edge: no handler may take the connection down
            response = to_response(error)
        # A signed link to a file needs no key, so its requests have no tenant.
        tenant = getattr(request.state, "tenant", None)
        service.metrics.request(name, response.status_code, service.clock.now() - started, tenant)
        return response

    return run
