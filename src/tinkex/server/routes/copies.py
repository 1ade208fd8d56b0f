"""Copies checkpoints, also those that another tenant published; and imports a PEFT adapter as a checkpoint.

Either gets its own run, which only owns the checkpoint: it was never in the engine and cannot be trained. To continue
training, a client creates a model from the checkpoint, as from any other.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import orjson
from starlette.responses import Response

from tinkex.engine.contract import EngineDied, EngineFault, ModelInfo, OutOfMemory, adapter_bytes
from tinkex.engine.frames import Frame
from tinkex.rules.checkpoint_names import check_name, check_ttl
from tinkex.server.http.errors import RequestRejected, bad_request, json_response, not_found
from tinkex.server.http.fields import require_checkpoint_path
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes.sessions import idempotency_key
from tinkex.server.service import Service
from tinkex.server.upkeep.adapter_files import AdapterUpload, receive_archive, unpack
from tinkex.server.upkeep.checksums import check_row
from tinkex.store.errors import Duplicate, Unavailable
from tinkex.store.records import CheckpointRecord, OperationRecord, RunRecord, SessionRecord, lora_of

RELIEVED = 8
"""Runs that leave the engine when it has no memory for an import. It is tried once more, then the import fails."""


class CopyDestination(NamedTuple):
    """The session and run that a copied or imported checkpoint will belong to."""

    session: SessionRecord
    is_new: bool
    number: int

    @property
    def run_id(self) -> str:
        return f"{self.session.id}:train:{self.number}"


async def copy_weights(request: ApiRequest) -> Response:
    """Copy a checkpoint that the tenant may read into a session of the tenant, or into a new one."""
    service, tenant, body = request.service, request.tenant, await request.read_json()
    key = idempotency_key(request, "copy_weights")
    if key and (known := await service.db(service.store.recall, tenant, key)) is not None:
        return Response(known, media_type="application/json")
    source = await request.find_readable_checkpoint(require_checkpoint_path(body, "source_path"))
    check_row(source)
    ttl_s = check_ttl(body.get("ttl_seconds"))
    destination = await _destination(request, body, f"Copy of {source.path}")
    path = f"tinker://{destination.run_id}/{source.kind}/{source.name}"
    if await service.db(service.store.get_run, destination.run_id) is not None:
        existing = await service.db(service.store.get_checkpoint, path)
        if existing is None or existing.files != source.files:
            raise _run_exists(destination)
        return json_response({"tinker_path": path})  # a retry of a copy that succeeded
    now = service.clock.wall()
    async with service.quotas.reserving(path, tenant, source.size_bytes):
        copy = replace(
            source,
            path=path,
            tenant=tenant,
            run_id=destination.run_id,
            folder=service.store.folders.new(destination.run_id, source.kind, source.name),
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
            is_public=False,
        )
        try:
            await service.db.beside(service.store.folders.copy, source.folder, copy.folder, source.files)
        except FileNotFoundError:  # deleted meanwhile
            raise not_found("checkpoint", source.path) from None
        content = await _add_copy(service, destination, copy, "copy_weights", key)
    await request.write_audit("checkpoint.copy", copy.path, source=source.path)
    return Response(content, media_type="application/json")


async def _add_copy(
    service: Service, destination: CopyDestination, saved: CheckpointRecord, kind: str, key: str
) -> bytes:
    """Add the rows of a copied or imported checkpoint, and return the response. An error deletes its folder."""
    try:
        content, is_added = await service.db(_add_rows, service, destination, saved, kind, key)
    except Unavailable:  # the rows may be there although this was not confirmed; if not, the janitor deletes the folder
        raise
    except Exception as error:
        await service.db.beside(service.store.folders.remove, saved.folder)
        if isinstance(error, Duplicate):
            raise _run_exists(destination) from None
        raise
    if not is_added:
        await service.db.beside(service.store.folders.remove, saved.folder)
    return content


def _add_rows(
    service: Service, destination: CopyDestination, saved: CheckpointRecord, kind: str, key: str
) -> tuple[bytes, bool]:
    """Return the response, and whether the rows were added; not if another attempt with this key was faster."""
    store, now = service.store, saved.created_at
    if key and (known := store.recall(saved.tenant, key)) is not None:
        return known, False
    run = RunRecord(
        id=destination.run_id,
        tenant=saved.tenant,
        session_id=destination.session.id,
        base_model=saved.base_model,
        **lora_of(saved),
        seed=0,
        created_at=now,
        last_request_at=now,
        user_metadata=saved.user_metadata,
        is_unloaded=True,
    )
    creation = OperationRecord(
        request_id=f"{kind}-{uuid4().hex}",
        run_id=run.id,
        tenant=run.tenant,
        seq_id=0,
        kind=kind,
        digest="",
        state="done",
        created_at=now,
        finished_at=now,
    )
    session = destination.session if destination.is_new else None
    content = orjson.dumps({"tinker_path": saved.path})
    store.add_stored_run(run, creation, saved, session=session, key=key, response=content)
    return content, True


async def _destination(request: ApiRequest, body: dict[str, Any], display_name: str) -> CopyDestination:
    """Return the session and number that the body names, or a new session in the project that it names."""
    session_id, number = body.get("session_id"), body.get("model_seq_id")
    if session_id is None:
        return _new_destination(request, display_name, body.get("destination_project_id"))
    if not isinstance(session_id, str) or isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise bad_request("session_id must be text, and model_seq_id a whole number from 0.", "invalid")
    return CopyDestination(await request.find_session(session_id), False, number)


def _new_destination(request: ApiRequest, display_name: str, project_id: object = None) -> CopyDestination:
    """Return a new session that only owns the copied run; it is finished immediately."""
    if project_id is not None and not isinstance(project_id, str):
        raise bad_request("destination_project_id must be text.", "invalid")
    request.check_text("destination_project_id", project_id)
    now = request.service.clock.wall()
    finished = {"reason": {"type": "success"}, "detail": display_name}
    session = SessionRecord(
        id=str(uuid4()),
        tenant=request.tenant,
        created_at=now,
        seen_at=now,
        project_id=project_id,
        display_name=display_name,
        finished=finished,
    )
    return CopyDestination(session, True, 0)


def _run_exists(destination: CopyDestination) -> Exception:
    return bad_request(f"{destination.run_id} exists already. Use another model_seq_id.", "run_exists")


# ── Imports


async def import_weights(request: ApiRequest) -> Response:
    """`POST /api/v1/import_weights?base_model=…&name=…[&ttl_seconds=…]` with a tar of the two PEFT files as body."""
    service, tenant, query = request.service, request.tenant, request.query_params
    model = service.catalog.find(query.get("base_model"))
    name = check_name(query.get("name"))
    ttl = query.get("ttl_seconds")
    ttl_s = check_ttl(int(ttl) if ttl and ttl.isascii() and ttl.isdigit() else ttl)
    data_dir = service.config.data_dir
    destination = _new_destination(request, f"Import of {name}")
    with service.ledger.hold("uploads", tenant, 1, "uploads"):
        async with (
            service.quotas.reserving(destination.run_id, tenant, _declared_bytes(request)),
            receive_archive(request, data_dir) as archive,
        ):
            staged = archive.parent / "adapter"
            adapter = await asyncio.to_thread(unpack, archive, staged)
            await _check_loads(service, tenant, model, adapter, staged)
            saved = _imported(request, destination, model, adapter, name, ttl_s)
            await service.db.beside(service.store.folders.move_in, staged, saved.folder, saved.files)
            content = await _add_copy(service, destination, saved, "import_weights", "")
    await request.write_audit("checkpoint.import", saved.path, size_bytes=saved.size_bytes)
    return Response(content, media_type="application/json")


def _imported(
    request: ApiRequest,
    destination: CopyDestination,
    model: ModelInfo,
    adapter: AdapterUpload,
    name: str,
    ttl_s: float | None,
) -> CheckpointRecord:
    """Return the row of an imported checkpoint. Its folder is not there yet, but the folder above it is."""
    now = request.service.clock.wall()
    return CheckpointRecord(
        path=f"tinker://{destination.run_id}/weights/{name}",
        tenant=request.tenant,
        run_id=destination.run_id,
        kind="weights",
        name=name,
        folder=request.service.store.folders.new(destination.run_id, "weights", name),
        base_model=model.name,
        created_at=now,
        size_bytes=sum(about["size_bytes"] for about in adapter.files.values()),
        expires_at=None if ttl_s is None else now + ttl_s,
        **asdict(adapter),
    )


def _declared_bytes(request: ApiRequest) -> int:
    """Return the size of the body for the quota. Raises 411 if there is one and the client does not say."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit():
        return int(declared)
    if not request.service.quotas.is_limited:
        return 0
    raise RequestRejected(
        411, "This service has a quota, so it must know the size: send a Content-Length.", "length_required"
    )


async def _check_loads(service: Service, tenant: str, model: ModelInfo, adapter: AdapterUpload, folder: Path) -> None:
    """Load the adapter in the engine once: one that cannot be used is rejected now and not at the first step.

    It takes memory as a run's adapter does: it has to fit, waits for room, and gives it back. One import at a time, so
    that those of one tenant do not push the runs of all others out.
    """
    try:
        async with service.worker.models.use(model.name):
            await _check_with_engine(service, tenant, model, adapter, folder)
    except EngineFault as error:
        if error.category != "user":
            raise RequestRejected(500, str(error), "engine_failed", "server") from None
        raise bad_request(str(error), "bad_adapter") from None
    except EngineDied:
        raise RequestRejected(
            503, "The engine died while it loaded the adapter. Send it again.", "engine_died", "server"
        ) from None


async def _check_with_engine(
    service: Service, tenant: str, model: ModelInfo, adapter: AdapterUpload, folder: Path
) -> None:
    name, memory = f"import-{uuid4().hex}", service.worker.memory
    await service.engine.ready()
    size = adapter_bytes(service.engine.state.lora_sizes.get(model.name, {}), lora_of(adapter))
    memory.check_size(service.ledger, size, f"An adapter of rank {adapter.rank} on {model.name}")
    async with service.importing:
        await memory.reserve(name, tenant, size)
        try:
            await _load_once(service, name, model, adapter, folder)
        except OutOfMemory:
            if not await memory.relieve(RELIEVED, name):
                raise
            await _load_once(service, name, model, adapter, folder)
        finally:
            memory.release(name)


async def _load_once(service: Service, name: str, model: ModelInfo, adapter: AdapterUpload, folder: Path) -> None:
    create = {"op": "create", "adapter": name, "base": model.name, "seed": 0, **lora_of(adapter)}
    await service.engine.run(Frame(create))
    try:
        load = {"op": "load", "adapter": name, "folder": str(folder), "with_optimizer": False, "is_upload": True}
        await service.engine.run(Frame(load))
    finally:
        await service.engine.run(Frame({"op": "drop", "adapter": name}))
