"""The table of handlers covers the API exactly."""

from __future__ import annotations

from tinkex.server.routes.table import HANDLERS, api_routes
from tinkex.wire import endpoints


def test_every_endpoint_has_exactly_one_handler() -> None:
    assert sorted(HANDLERS) == sorted(endpoints.ALL)


def test_every_handler_serves_one_endpoint_and_has_its_name() -> None:
    names = {endpoint.name: getattr(handler, "__name__", "") for endpoint, handler in HANDLERS.items()}
    assert names == {endpoint.name: endpoint.name for endpoint in endpoints.ALL}
    assert len(set(HANDLERS.values())) == len(HANDLERS)


def test_every_endpoint_is_reached_by_its_own_path() -> None:
    """No route before it matches the path, although ids of checkpoints and tokenizers may hold slashes."""
    parts = {"checkpoint_id": "weights/0001", "tokenizer": "owner/name", "base_model": "owner/name"}
    for endpoint in endpoints.ALL:
        names = [part.split("}")[0] for part in endpoint.path.split("{")[1:]]
        path = endpoint.url(**{name: parts.get(name, "x") for name in names})
        scope = {"type": "http", "method": endpoint.method, "path": path, "root_path": ""}
        matched = [route for route in api_routes() if route.matches(scope)[0].name == "FULL"]
        pattern = endpoint.path.replace("{checkpoint_id}", "{checkpoint_id:path}")
        for name in ("tokenizer", "base_model"):
            pattern = pattern.replace(f"{{{name}}}", f"{{{name}:path}}")
        assert matched[0].path == pattern, endpoint.name
