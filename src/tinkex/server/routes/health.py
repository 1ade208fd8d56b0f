"""Whether the service lives (restart it if not) and is ready (send it no requests if not), for those who run it.

No key is needed. Both respond within seconds, whatever hangs.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from tinkex.server.http.errors import RequestRejected, json_response
from tinkex.server.http.requests import ApiRequest, guarded


async def livez(request: ApiRequest) -> Response:
    """Return 200: whoever reads this knows that the event loop turns. A restart would not mend anything else."""
    return json_response({"status": "ok"})


async def readyz(request: ApiRequest) -> Response:
    """Return 200 only if the service can work: database, engine and disk. Otherwise 503 with the reason."""
    service = request.service
    if (reason := await service.readiness.reason(service)) is not None:
        raise RequestRejected(503, reason, "not_ready", "server", {"retry-after": "1"})
    return json_response({"status": "ok"})


ROUTES = [Route("/livez", guarded("livez", livez)), Route("/readyz", guarded("readyz", readyz))]
