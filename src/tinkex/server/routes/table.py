"""The handler of every endpoint of `wire.endpoints`, and of the two calls that only `tinkex` itself uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast

from starlette.routing import Route

from tinkex.server.http.requests import Handler, guarded
from tinkex.server.routes import (
    account,
    checkpoints,
    copies,
    files,
    futures,
    insight,
    logged,
    offered_models,
    runs,
    sampling,
    sessions,
    training,
)
from tinkex.wire import endpoints
from tinkex.wire.endpoints import Endpoint

_MODULES: Final = (
    account,
    checkpoints,
    copies,
    files,
    futures,
    insight,
    logged,
    offered_models,
    runs,
    sampling,
    sessions,
    training,
)


def _handler(name: str) -> Handler:
    """Return the function that has the name of the endpoint. There is one, in one of the modules."""
    [handler] = [getattr(module, name) for module in _MODULES if hasattr(module, name)]
    return cast(Handler, handler)


HANDLERS: Final[Mapping[Endpoint, Handler]] = {endpoint: _handler(endpoint.name) for endpoint in endpoints.ALL}

_MOST_CALLED: Final = (
    endpoints.RETRIEVE_FUTURE,
    endpoints.ASAMPLE,
    endpoints.FORWARD_BACKWARD,
    endpoints.OPTIM_STEP,
    endpoints.FORWARD,
    endpoints.SESSION_HEARTBEAT,
)
"""Starlette tries routes in order, so the endpoints of a training loop come first."""


def api_routes() -> list[Route]:
    """Return one route per endpoint. Paths without ids come first: `training_runs/find` is no run. Then the longer
    ones, because `{checkpoint_id:path}` matches slashes too."""
    rows = sorted(HANDLERS.items(), key=lambda row: (row[0] not in _MOST_CALLED, "{" in row[0].path, -len(row[0].path)))
    return [
        *(
            Route(_pattern(endpoint.path), guarded(endpoint.name, handler), methods=[endpoint.method])
            for endpoint, handler in rows
        ),
        Route("/api/v1/files/{token}/{name}", guarded("download_file", files.download_file)),
        Route("/api/v1/import_weights", guarded("import_weights", copies.import_weights), methods=["POST"]),
    ]


def _pattern(path: str) -> str:
    """Let the ids that consist of several segments match slashes."""
    return re.sub(r"\{(checkpoint_id|tokenizer|base_model)\}", r"{\1:path}", path)
