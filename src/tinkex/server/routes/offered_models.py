"""Endpoints with which the service's owner offers another base model, or withdraws one.

What was offered is kept in the database, so that it is offered after a restart. Nothing is downloaded here: a request
would be open for hours. `tinkex models pull` does that, and `tinkex models add` says so.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.responses import Response

from tinkex.engine.contract import ModelInfo
from tinkex.engine.models.registry import resolve
from tinkex.errors import ConfigError
from tinkex.server.http.errors import bad_request, json_response, not_found
from tinkex.server.http.fields import require_text
from tinkex.server.http.requests import ApiRequest
from tinkex.server.service import Service
from tinkex.server.upkeep.base_models import fixed_reason, size_estimate


async def offer_model(request: ApiRequest) -> Response:
    """Offer a built-in, a folder, or a model in the cache of the hub. It is loaded at its first use."""
    service = request.service
    await service.access.check_owner(request.scope, request.tenant)
    _check_changeable(service)
    name = require_text(await request.read_json(), "name")
    request.check_text("name", name)
    async with service.offering:
        info = await asyncio.to_thread(_resolve, name, service.config.cache_dir)
        _check_names(service, info)
        size, budget = size_estimate(service.config, info), service.worker.models.budget_bytes
        if size > budget:
            reason = f"Base model {info.name} takes {-(-size // 10**6)} MB of memory"
            raise service.ledger.rejection("base_model_memory_mb", reason, value=budget // 10**6)
        source = info.folder if info.source == "folder" else name
        await service.db(service.store.offer_model, info.name, source, service.clock.wall())
        service.catalog.add(info)
    service.worker.wake()  # runs on it may have waited
    await request.write_audit("model.offer", info.name)
    return json_response(service.worker.models.status(info))


async def withdraw_model(request: ApiRequest) -> Response:
    """Offer a model no longer, and unload it. Rejected while something uses it."""
    service = request.service
    await service.access.check_owner(request.scope, request.tenant)
    _check_changeable(service)
    name = request.path_params["base_model"]
    async with service.offering:
        info = service.catalog.get(name)
        if info is None:
            raise not_found("base model", name)
        if service.worker.has_work_on(info.name) or not await service.worker.models.unload(info.name):
            raise bad_request(
                f"Base model {info.name} is in use: operations or samples of it wait or run. Try again when they have "
                "ended.",
                "model_in_use",
            )
        service.catalog.remove(info.name)
        service.tokenizers.forget(info.name)
        await service.db(service.store.withdraw_model, info.name)
    await request.write_audit("model.withdraw", info.name)
    return json_response(None)


def _check_changeable(service: Service) -> None:
    if (reason := fixed_reason(service.config)) is not None:
        raise bad_request(
            f"The base models of this service are those of its start: {reason}, others cannot be offered while it "
            "runs. Start it again with another --base-model.",
            "models_are_fixed",
        )


def _resolve(name: str, cache_dir: Path) -> ModelInfo:
    path = Path(name)
    if not path.is_absolute() and (name.startswith((".", "~")) or (path / "config.json").is_file()):
        raise bad_request(f"Give the whole path of the folder, not {name[:200]!r}.", "bad_model")
    try:
        return resolve(name, cache_dir, may_download=False)
    except ConfigError as error:
        raise bad_request(str(error), "bad_model") from None


def _check_names(service: Service, info: ModelInfo) -> None:
    """Reject a model that has a name of another one: adapters belong to the weights that they were trained on."""
    for name in info.names:
        other = service.catalog.get(name)
        if other is not None and other.folder != info.folder:
            raise bad_request(
                f"A base model {name} is offered already, with other files. Withdraw it first, or rename the folder.",
                "name_taken",
            )
