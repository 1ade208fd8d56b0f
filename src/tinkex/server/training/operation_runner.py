"""Runs one training operation: the engine's command, the client's response, and the rows that are stored with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from tinkex.clock import Clock
from tinkex.engine import frames
from tinkex.engine.contract import Engine, EngineDied, EngineFault, read_outputs
from tinkex.engine.frames import Frame
from tinkex.server.limits.quotas import QuotaExceeded, Quotas
from tinkex.server.training.residency import Residency, damaged, read_command
from tinkex.server.training.run_queue import PendingOperation, RunQueue
from tinkex.server.training.waiters import OperationResult
from tinkex.server.upkeep.blob_calls import held, keep
from tinkex.server.upkeep.checksums import DamagedCheckpoint, check_files
from tinkex.server.upkeep.database_thread import Db
from tinkex.store.blobs.data_folder import EPHEMERAL
from tinkex.store.errors import DamagedBlob
from tinkex.store.records import CheckpointKind, CheckpointRecord, DamagedJson, SamplerRecord, lora_of
from tinkex.store.store import Store
from tinkex.types.training import ForwardBackwardOutput
from tinkex.wire import proto_codec

logger = logging.getLogger("tinkex.server")

CHECKPOINT_KINDS: dict[str, CheckpointKind] = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}


MAX_LOOP_BYTES = 1 << 20
"""Results of passes up to this size are encoded on the event loop: that takes a few milliseconds."""


class OperationRunner:
    def __init__(
        self, clock: Clock, store: Store, db: Db, engine: Engine, residency: Residency, quotas: Quotas
    ) -> None:
        self._clock, self._store, self._db, self._engine = clock, store, db, engine
        self._residency, self._quotas = residency, quotas

    async def run(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        """Run an operation whose adapter is in the engine. Raises EngineFault (final) or EngineDied (run it again)."""
        kind, run_id = pending.row.kind, queue.run.id
        if isinstance(pending.row.options, DamagedJson):
            raise damaged(pending.row, "its options cannot be read")
        if kind in ("forward", "forward_backward", "optim_step"):
            return await self._compute(pending)
        if kind in CHECKPOINT_KINDS:
            return await self._save(queue, pending)
        if kind in ("load_weights", "load_model"):
            return await self._load(queue, pending)
        if kind == "create_model":
            return _json_result(pending, {"type": "create_model", "model_id": run_id})
        if kind == "unload_model":
            await self._db(self._store.set_unloaded, run_id, queue.home)
            return _json_result(pending, {"type": "unload_model", "model_id": run_id})
        raise EngineFault(f"This service does not know the operation {kind!r}.", "server")

    async def _compute(self, pending: PendingOperation) -> OperationResult:
        """Hand the encoded frame to the engine as the journal has it, untouched."""
        command, tenant = pending.command, pending.row.tenant
        if command is None:
            command = await read_command(self._db, self._store, pending.row)
        started = self._clock.now()
        reply = await self._engine.run(command, tenant=tenant)
        engine_s = self._clock.now() - started
        metrics: dict[str, float] = reply.head["metrics"]
        if pending.row.kind == "optim_step":
            rate = frames.decode(command).head["learning_rate"]
            return _json_result(
                pending,
                {"type": "optim_step", "metrics": metrics},
                engine_s=engine_s,
                metrics={**metrics, "learning_rate": rate},
            )
        size = sum(memoryview(buffer).nbytes for buffer in reply.buffers)
        content = _encode_pass(reply) if size <= MAX_LOOP_BYTES else await asyncio.to_thread(_encode_pass, reply)
        return OperationResult(
            tenant=tenant,
            content=content,
            content_type="proto",
            engine_s=engine_s,
            own_s=reply.head.get("seconds"),
            metrics=metrics,
        )

    async def _save(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        options, run = pending.row.options, queue.run
        name, kind = options.get("name"), CHECKPOINT_KINDS[pending.row.kind]
        is_ephemeral = name is None
        path = f"tinker://{run.id}/{kind}/{name}"
        must_be_new = not is_ephemeral and options.get("overwrite") is False
        if must_be_new and await self._db(self._store.get_live_checkpoint, path, self._clock.wall()) is not None:
            raise EngineFault(
                f"{path} exists already. Choose another name, or pass overwrite=True to replace it.", "user"
            )
        await self._reserve(queue, pending, kind, "" if is_ephemeral else path)
        # A folder is never written twice: a download or a sampler that reads the former one goes on reading it.
        leaf, folders = str(options["sampling_session_seq_id"] if is_ephemeral else name), self._store.folders
        if queue.home is not None:  # a former home that was frozen may still be writing one of this name
            leaf = f"{leaf}.{queue.home.epoch}"
        folder = folders.new(run.id, EPHEMERAL if is_ephemeral else kind, leaf)
        command = {"op": "save", "adapter": run.id, "base": run.base_model, "folder": str(folders.path(folder))}
        reply = await self._engine.run(Frame({**command, "with_optimizer": kind == "weights"}))
        await keep(self._db, self._store, run.tenant, folder, reply.head["files"])
        self._quotas.note_bytes(run, kind, reply.head["size_bytes"])
        if is_ephemeral:
            return await self._ephemeral_sampler(queue, pending, folder, reply.head["size_bytes"])
        now, ttl_s = self._clock.wall(), options.get("ttl_seconds")
        checkpoint = CheckpointRecord(
            path=path,
            tenant=run.tenant,
            run_id=run.id,
            kind=kind,
            name=str(name),
            folder=folder,
            base_model=run.base_model,
            **lora_of(run),
            created_at=now,
            size_bytes=reply.head["size_bytes"],
            files=reply.head["files"],
            has_optimizer=kind == "weights",
            expires_at=None if ttl_s is None else now + ttl_s,
            user_metadata=options.get("user_metadata"),
        )
        return _json_result(pending, {"type": pending.row.kind, "path": path}, checkpoint=checkpoint)

    async def _reserve(self, queue: RunQueue, pending: PendingOperation, kind: str, path: str) -> None:
        """Reserve what the checkpoint will take, before it is written. When it was accepted, its size was a guess."""
        run = queue.run
        if not self._quotas.is_limited:
            return
        command = {"op": "size", "adapter": run.id, "with_optimizer": kind == "weights"}
        size = (await self._engine.run(Frame(command))).head["size_bytes"]
        try:
            await self._quotas.reserve((run.id, pending.row.seq_id), run.tenant, size, replaced_path=path)
        except QuotaExceeded as error:
            raise EngineFault(error.detail, "user") from None

    async def _ephemeral_sampler(
        self, queue: RunQueue, pending: PendingOperation, folder: str, size_bytes: int
    ) -> OperationResult:
        """Return a sampler of weights that were saved without a name; they go with the session."""
        run = queue.run
        sampler_id = f"{run.session_id}:sample:{pending.row.options['sampling_session_seq_id']}"
        if await self._db(self._store.get_sampler, sampler_id) is not None:
            # A client that goes on with a run of an earlier session counts its samplers from 0 again.
            sampler_id = f"{sampler_id}:{pending.row.seq_id}"
        sampler = SamplerRecord(
            id=sampler_id,
            tenant=run.tenant,
            session_id=run.session_id,
            base_model=run.base_model,
            created_at=self._clock.wall(),
            folder=folder,
            size_bytes=size_bytes,
        )
        # No `path`: clients before 0.36 reject an ephemeral response that has one.
        return _json_result(pending, {"type": pending.row.kind, "sampling_session_id": sampler_id}, sampler=sampler)

    async def _load(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        options, run = pending.row.options, queue.run
        path = options["path"]
        source = await self._db(self._store.get_readable_checkpoint, path, run.tenant, self._clock.wall())
        if source is None:
            raise EngineFault(f"Checkpoint {path!r} is not known.", "user")
        with_optimizer = bool(options.get("optimizer"))
        if with_optimizer and not source.has_optimizer:
            raise EngineFault(
                f"{path} has no optimizer state. Load a training checkpoint (…/weights/…), or weights only.", "user"
            )
        if source.base_model != run.base_model:
            raise EngineFault(
                f"{path} belongs to the base model {source.base_model}, this run to {run.base_model}.", "user"
            )
        async with self._held(run.tenant, source) as folder:
            command = {"op": "load", "adapter": run.id, "folder": str(folder), "with_optimizer": with_optimizer}
            await self._engine.run(Frame(command))
        # The source may be deleted or replaced before a crash: the journal alone could not bring this state back.
        try:
            await self._residency.snapshot(queue, pending.row.seq_id)
        except EngineDied:
            raise
        except Exception:
            # The operation fails, so the run has to be as it was before; what the engine has now is not.
            await self._residency.drop(run.id)
            raise
        return _json_result(pending, {"type": "load_weights", "path": path, "model_id": run.id})

    @asynccontextmanager
    async def _held(self, tenant: str, source: CheckpointRecord) -> AsyncIterator[Path]:
        """Let the block read the files of a checkpoint, which are what was saved.

        They are read every time: a run goes on for hours with what it loads.
        """
        async with AsyncExitStack() as stack:
            check = partial(check_files, source, may_skip_known=False)
            try:
                folder = await stack.enter_async_context(held(self._db, self._store, tenant, source.folder, check))
            except FileNotFoundError:
                raise EngineFault(f"The files of {source.path} are gone. Was it deleted meanwhile?", "server") from None
            except (DamagedCheckpoint, DamagedBlob) as error:
                logger.error("%s", error)
                raise EngineFault(str(error), "server") from None
            yield folder


def _encode_pass(reply: Frame) -> bytes:
    """Return the client's response to a pass."""
    output = ForwardBackwardOutput.model_construct(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=read_outputs(reply), metrics=reply.head["metrics"]
    )
    return proto_codec.encode_forward_backward_output(output)


def _json_result(pending: PendingOperation, response: dict[str, Any], **rest: Any) -> OperationResult:
    return OperationResult(tenant=pending.row.tenant, content=orjson.dumps(response), **rest)
