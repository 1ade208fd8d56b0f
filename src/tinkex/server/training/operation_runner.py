"""Runs one training operation: the engine's command, the client's response, and the rows that are stored with it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from tinkex.clock import Clock
from tinkex.engine import frames
from tinkex.engine.contract import Engine, EngineDied, EngineFault, read_outputs
from tinkex.engine.frames import Frame
from tinkex.server.training.residency import Residency
from tinkex.server.training.run_queue import PendingOperation, RunQueue
from tinkex.server.upkeep import folders
from tinkex.server.upkeep.database_thread import Db
from tinkex.store.records import CheckpointKind, CheckpointRecord, SamplerRecord
from tinkex.store.store import Store
from tinkex.types.training import ForwardBackwardOutput
from tinkex.wire import proto_codec

logger = logging.getLogger("tinkex.server")

CHECKPOINT_KINDS: dict[str, CheckpointKind] = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """The bytes to send to the client, and what the store writes in the same transaction."""

    content: bytes
    content_type: Literal["json", "proto"] = "json"
    checkpoint: CheckpointRecord | None = None
    sampler: SamplerRecord | None = None
    engine_s: float = 0.0
    """How long it was in the engine."""
    own_s: float | None = None
    """The part of that time that it used alone; unknown for short commands."""
    metrics: dict[str, float] | None = None
    """Numbers that the journal keeps after the result has expired."""


class OperationRunner:
    def __init__(
        self, clock: Clock, store: Store, db: Db, engine: Engine, residency: Residency, data_dir: Path
    ) -> None:
        self._clock, self._store, self._db, self._engine = clock, store, db, engine
        self._residency, self._data_dir = residency, data_dir

    async def run(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        """Run an operation whose adapter is in the engine. Raises EngineFault (final) or EngineDied (run it again)."""
        kind = pending.kind
        if kind in ("forward", "forward_backward"):
            return await self._pass(pending)
        if kind == "optim_step":
            return await self._optim_step(pending)
        if kind in CHECKPOINT_KINDS:
            return await self._save(queue, pending)
        if kind in ("load_weights", "load_model"):
            return await self._load(queue, pending)
        if kind == "create_model":
            return _json_result({"type": "create_model", "model_id": queue.run.id})
        if kind == "unload_model":
            await self._db(self._store.set_unloaded, queue.run.id)
            return _json_result({"type": "unload_model", "model_id": queue.run.id})
        raise EngineFault(f"This service does not know the operation {kind!r}.", "server")

    async def _pass(self, pending: PendingOperation) -> OperationResult:
        started = self._clock.now()
        reply = await self._engine.run(await self._command(pending), tenant=pending.tenant)
        engine_s = self._clock.now() - started
        metrics: dict[str, float] = reply.head["metrics"]
        output = ForwardBackwardOutput.model_construct(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=read_outputs(reply), metrics=metrics
        )
        content = proto_codec.encode_forward_backward_output(output)
        own_s = reply.head.get("seconds")
        return OperationResult(content=content, content_type="proto", engine_s=engine_s, own_s=own_s, metrics=metrics)

    async def _optim_step(self, pending: PendingOperation) -> OperationResult:
        command = await self._command(pending)
        started = self._clock.now()
        reply = await self._engine.run(command, tenant=pending.tenant)
        engine_s = self._clock.now() - started
        metrics: dict[str, float] = reply.head["metrics"]
        rate = frames.decode(command).head["learning_rate"]
        return OperationResult(
            content=orjson.dumps({"type": "optim_step", "metrics": metrics}),
            engine_s=engine_s,
            metrics={**metrics, "learning_rate": rate},
        )

    async def _command(self, pending: PendingOperation) -> bytes:
        """Return the encoded frame as the journal has it: it goes to the engine untouched."""
        if pending.command is not None:
            return pending.command
        return await self._db(self._store.command, pending.request_id)

    async def _save(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        options, run = pending.options, queue.run
        name, kind = options.get("name"), CHECKPOINT_KINDS[pending.kind]
        is_ephemeral = name is None
        path = f"tinker://{run.id}/{kind}/{name}"
        must_be_new = not is_ephemeral and options.get("overwrite") is False
        if must_be_new and await self._db(self._store.get_live_checkpoint, path, self._clock.wall()) is not None:
            raise EngineFault(
                f"{path} exists already. Choose another name, or pass overwrite=True to replace it.", "user"
            )
        # A folder is never written twice: a download or a sampler that reads the former one goes on reading it.
        leaf = str(options["sampling_session_seq_id"] if is_ephemeral else name)
        folder = folders.new_folder(self._data_dir, run.id, folders.EPHEMERAL if is_ephemeral else kind, leaf)
        command = {"op": "save", "adapter": run.id, "folder": str(self._data_dir / folder)}
        reply = await self._engine.run(Frame({**command, "with_optimizer": kind == "weights"}))
        if is_ephemeral:
            return await self._ephemeral_sampler(queue, pending, folder)
        now, ttl_s = self._clock.wall(), options.get("ttl_seconds")
        checkpoint = CheckpointRecord(
            path=path,
            tenant=run.tenant,
            run_id=run.id,
            kind=kind,
            name=str(name),
            folder=folder,
            base_model=run.base_model,
            rank=run.rank,
            train_attn=run.train_attn,
            train_mlp=run.train_mlp,
            train_unembed=run.train_unembed,
            created_at=now,
            size_bytes=reply.head["size_bytes"],
            files=reply.head["files"],
            has_optimizer=kind == "weights",
            expires_at=None if ttl_s is None else now + ttl_s,
            user_metadata=options.get("user_metadata"),
        )
        return OperationResult(content=orjson.dumps({"type": pending.kind, "path": path}), checkpoint=checkpoint)

    async def _ephemeral_sampler(self, queue: RunQueue, pending: PendingOperation, folder: str) -> OperationResult:
        """Return a sampler of weights that were saved without a name; they go with the session."""
        run = queue.run
        sampler_id = f"{run.session_id}:sample:{pending.options['sampling_session_seq_id']}"
        if await self._db(self._store.get_sampler, sampler_id) is not None:
            # A client that goes on with a run of an earlier session counts its samplers from 0 again.
            sampler_id = f"{sampler_id}:{pending.seq_id}"
        sampler = SamplerRecord(
            id=sampler_id,
            tenant=run.tenant,
            session_id=run.session_id,
            base_model=run.base_model,
            created_at=self._clock.wall(),
            folder=folder,
        )
        # No `path`: clients before 0.36 reject an ephemeral response that has one.
        content = orjson.dumps({"type": pending.kind, "sampling_session_id": sampler_id})
        return OperationResult(content=content, sampler=sampler)

    async def _load(self, queue: RunQueue, pending: PendingOperation) -> OperationResult:
        options, run = pending.options, queue.run
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
        folder = str(self._data_dir / source.folder)
        command = {"op": "load", "adapter": run.id, "folder": folder, "with_optimizer": with_optimizer}
        await self._engine.run(Frame(command))
        # The source may be deleted or replaced before a crash: the journal alone could not bring this state back.
        try:
            await self._residency.snapshot(queue, pending.seq_id)
        except EngineDied:
            raise
        except Exception:
            # The operation fails, so the run has to be as it was before; what the engine has now is not.
            await self._residency.drop(run.id)
            raise
        return _json_result({"type": "load_weights", "path": path, "model_id": run.id})

    def remove(self, checkpoint: CheckpointRecord) -> None:
        """Delete the files of a checkpoint that no row refers to any more."""
        folders.remove(self._data_dir, checkpoint.folder)


def _json_result(response: dict[str, Any]) -> OperationResult:
    return OperationResult(content=orjson.dumps(response))
