"""Imports a PEFT adapter as a training checkpoint without optimizer state. Like a copy, it gets its own run."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

from starlette.responses import Response

from tinkex.engine.contract import EngineDied, EngineFault, ModelInfo
from tinkex.engine.frames import Frame
from tinkex.rules.limits import check_name, check_ttl
from tinkex.server.http.errors import RequestRejected, bad_request
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes.copies import add_copy, new_destination
from tinkex.server.service import Service
from tinkex.server.upkeep import folders
from tinkex.server.upkeep.adapter_files import AdapterUpload, receive_archive, unpack
from tinkex.store.records import CheckpointRecord


async def import_weights(request: ApiRequest) -> Response:
    """`POST /api/v1/import_weights?base_model=…&name=…[&ttl_seconds=…]` with a tar of the two PEFT files as body."""
    service, tenant, query = request.service, request.tenant, request.query_params
    model = service.catalog.find(query.get("base_model"))
    name = check_name(query.get("name"))
    ttl = query.get("ttl_seconds")
    ttl_s = check_ttl(int(ttl) if ttl and ttl.isascii() and ttl.isdigit() else ttl)
    data_dir = service.config.data_dir
    destination = new_destination(request, f"Import of {name}")
    async with receive_archive(request, data_dir) as archive:
        staged = archive.parent / "adapter"
        adapter = await asyncio.to_thread(unpack, archive, staged)
        await _check_loads(service, model, adapter, staged)
        folder = folders.new_folder(data_dir, destination.run_id, "weights", name)
        await asyncio.to_thread(staged.replace, folders.resolve_inside(data_dir, folder))
    now = service.clock.wall()
    saved = CheckpointRecord(
        path=f"tinker://{destination.run_id}/weights/{name}",
        tenant=tenant,
        run_id=destination.run_id,
        kind="weights",
        name=name,
        folder=folder,
        base_model=model.name,
        created_at=now,
        size_bytes=sum(about["size_bytes"] for about in adapter.files.values()),
        expires_at=None if ttl_s is None else now + ttl_s,
        **asdict(adapter),
    )
    content = await add_copy(service, destination, saved, "import_weights", "")
    await request.write_audit("checkpoint.import", saved.path, size_bytes=saved.size_bytes)
    return Response(content, media_type="application/json")


async def _check_loads(service: Service, model: ModelInfo, adapter: AdapterUpload, folder: Path) -> None:
    """Load the adapter in the engine once: one that cannot be used is rejected now and not at the first step."""
    name = f"import-{uuid4().hex}"
    flags = {flag: getattr(adapter, flag) for flag in ("train_attn", "train_mlp", "train_unembed")}
    create = {"op": "create", "adapter": name, "base": model.name, "rank": adapter.rank, "seed": 0, **flags}
    try:
        await service.engine.ready()
        await service.engine.run(Frame(create))
        try:
            await service.engine.run(
                Frame({"op": "load", "adapter": name, "folder": str(folder), "with_optimizer": False})
            )
        finally:
            await service.engine.run(Frame({"op": "drop", "adapter": name}))
    except EngineFault as error:
        if error.category != "user":
            raise RequestRejected(500, str(error), "engine_failed", "server") from None
        raise bad_request(str(error), "bad_adapter") from None
    except EngineDied:
        raise RequestRejected(
            503, "The engine died while it loaded the adapter. Send it again.", "engine_died", "server"
        ) from None
