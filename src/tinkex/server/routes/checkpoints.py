"""Endpoints for checkpoints: list, describe, publish, expire, delete."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.http import views
from tinkex.server.http.errors import json_response
from tinkex.server.http.lookup import (
    find_own_checkpoint,
    find_readable_checkpoint,
    find_run,
    parse_ttl,
    require_checkpoint_path,
)
from tinkex.server.http.requests import parse_page, read_json, service_of, tenant_of
from tinkex.server.routes.account import write_audit
from tinkex.server.routes.runs import checkpoints_of
from tinkex.server.upkeep import folders
from tinkex.store.records import CheckpointRecord


async def list_checkpoints(request: Request) -> Response:
    """Return all checkpoints of a run: clients request no page here."""
    service = service_of(request)
    run = await find_run(service, tenant_of(request), request.path_params["run_id"])
    now = service.clock.wall()
    saved = await service.db(lambda: list(checkpoints_of(service.store, run.tenant, run.id, now)))
    cursor = views.cursor(0, len(saved), len(saved))
    return json_response({"checkpoints": _visible(request, saved), "cursor": cursor})


async def list_user_checkpoints(request: Request) -> Response:
    service = service_of(request)
    offset, limit = parse_page(request, 100)
    saved, total = await service.db(
        service.store.list_checkpoints, tenant_of(request), None, offset, limit, service.clock.wall()
    )
    cursor = views.cursor(offset, limit, total)
    return json_response({"checkpoints": _visible(request, saved), "cursor": cursor})


def _visible(request: Request, saved: list[CheckpointRecord]) -> list[dict[str, Any]]:
    """Return the checkpoints as JSON, without exports for official clients before 0.28.

    An export in a list makes such a client reject the whole list.
    """
    version = re.match(r"(\d{1,6})\.(\d{1,6})", request.headers.get("x-stainless-package-version", ""))
    is_old = version is not None and (int(version[1]), int(version[2])) < (0, 28)
    return [views.checkpoint(record) for record in saved if not (is_old and record.kind == "external_weights")]


async def delete_checkpoint(request: Request) -> Response:
    service = service_of(request)
    saved = await _own_checkpoint(request)
    deleted = await service.db(service.store.delete_checkpoint, saved.path)
    if deleted is not None:
        # The row first: a crash in between leaves a folder without a row, which the janitor deletes.
        await asyncio.to_thread(folders.remove, service.config.data_dir, deleted.folder)
        await write_audit(service, saved.tenant, "checkpoint.delete", saved.path, size_bytes=saved.size_bytes)
    return json_response(None)


async def publish_checkpoint(request: Request) -> Response:
    return await _set_public(request, True)


async def unpublish_checkpoint(request: Request) -> Response:
    return await _set_public(request, False)


async def _set_public(request: Request, is_public: bool) -> Response:
    service = service_of(request)
    saved = await _own_checkpoint(request)
    await service.db(service.store.set_public, saved.path, is_public)
    await write_audit(service, saved.tenant, "checkpoint.publish" if is_public else "checkpoint.unpublish", saved.path)
    return json_response(None)


async def set_checkpoint_ttl(request: Request) -> Response:
    service = service_of(request)
    saved = await _own_checkpoint(request)
    ttl_s = parse_ttl(await read_json(request))
    expires_at = None if ttl_s is None else service.clock.wall() + ttl_s
    await service.db(service.store.set_expiry, saved.path, expires_at)
    await write_audit(service, saved.tenant, "checkpoint.ttl", saved.path, ttl_seconds=ttl_s)
    return json_response(None)


async def weights_info(request: Request) -> Response:
    service = service_of(request)
    path = require_checkpoint_path(await read_json(request), "tinker_path")
    return json_response(views.weights_info(await find_readable_checkpoint(service, tenant_of(request), path)))


async def _own_checkpoint(request: Request) -> CheckpointRecord:
    """Return the checkpoint that the URL names, if the tenant may change it."""
    path = f"tinker://{request.path_params['run_id']}/{request.path_params['checkpoint_id']}"
    return await find_own_checkpoint(service_of(request), tenant_of(request), path)
