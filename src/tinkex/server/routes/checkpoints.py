"""Endpoints for checkpoints: list, describe, publish, expire, delete."""

from __future__ import annotations

import re
from functools import partial

from starlette.responses import Response

from tinkex.rules.checkpoint_names import check_ttl
from tinkex.server.http import views
from tinkex.server.http.errors import json_response
from tinkex.server.http.fields import require_checkpoint_path
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes.runs import checkpoints_of
from tinkex.store.records import CheckpointRecord


async def list_checkpoints(request: ApiRequest) -> Response:
    """Return all checkpoints of a run: clients request no page here."""
    service = request.service
    run = await request.find_run(request.path_params["run_id"])
    now = service.clock.wall()
    saved = await service.db(lambda: list(checkpoints_of(service.store, run.tenant, run.id, now)))
    return _listed(request, saved, 0, len(saved), len(saved))


async def list_user_checkpoints(request: ApiRequest) -> Response:
    service = request.service
    offset, limit = request.parse_page(100)
    saved, total = await service.db(
        service.store.list_checkpoints, request.tenant, None, offset, limit, service.clock.wall()
    )
    return _listed(request, saved, offset, limit, total)


def _listed(request: ApiRequest, saved: list[CheckpointRecord], offset: int, limit: int, total: int) -> Response:
    """Return a page of checkpoints, without exports for official clients before 0.28.

    An export in a list makes such a client reject the whole list.
    """
    version = re.match(r"(\d{1,6})\.(\d{1,6})", request.headers.get("x-stainless-package-version", ""))
    is_old = version is not None and (int(version[1]), int(version[2])) < (0, 28)
    visible = [views.checkpoint(record) for record in saved if not (is_old and record.kind == "external_weights")]
    return json_response({"checkpoints": visible, "cursor": views.cursor(offset, limit, total)})


async def delete_checkpoint(request: ApiRequest) -> Response:
    service = request.service
    saved = await request.find_own_checkpoint()
    entry = request.audit_entry("checkpoint.delete", saved.path, size_bytes=saved.size_bytes)
    deleted = await service.db(partial(service.store.delete_checkpoint, saved.path, entry=entry))
    if deleted is not None:
        # The row first: a crash in between leaves a folder without a row, which the janitor deletes.
        await service.db.beside(service.store.folders.remove, deleted.folder)
        # Now, not at the janitor's next round: what else is written would take the space, and the next delete fail.
        await service.db(service.store.keep_reserve)
    return json_response(None)


async def publish_checkpoint(request: ApiRequest) -> Response:
    return await _set_public(request, True)


async def unpublish_checkpoint(request: ApiRequest) -> Response:
    return await _set_public(request, False)


async def _set_public(request: ApiRequest, is_public: bool) -> Response:
    service = request.service
    saved = await request.find_own_checkpoint()
    await service.db(service.store.set_public, saved.path, is_public)
    await request.write_audit("checkpoint.publish" if is_public else "checkpoint.unpublish", saved.path)
    return json_response(None)


async def set_checkpoint_ttl(request: ApiRequest) -> Response:
    service = request.service
    saved = await request.find_own_checkpoint()
    ttl_s = check_ttl((await request.read_json()).get("ttl_seconds"))
    expires_at = None if ttl_s is None else service.clock.wall() + ttl_s
    await service.db(service.store.set_expiry, saved.path, expires_at)
    await request.write_audit("checkpoint.ttl", saved.path, ttl_seconds=ttl_s)
    return json_response(None)


async def weights_info(request: ApiRequest) -> Response:
    path = require_checkpoint_path(await request.read_json(), "tinker_path")
    return json_response(views.weights_info(await request.find_readable_checkpoint(path)))
