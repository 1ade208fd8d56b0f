"""Turns records into the JSON that clients read, in the shapes of `tinkex.types`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from tinkex.engine.contract import ModelInfo
from tinkex.store.records import (
    AuditEntry,
    CheckpointRecord,
    KeyRecord,
    RunRecord,
    SamplerRecord,
    SessionRecord,
    lora_of,
)
from tinkex.store.run_records import ListedRun

ORGANISATION = "tml:organization:tinkex"
NO_PROJECT = "default"
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def time_text(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat().replace("+00:00", "Z")


def owner(tenant: str) -> str:
    return f"tml:user:{tenant}"


def cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def metadata(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return metadata with text values: official clients send any value but can read only text, so 5 becomes "5"."""
    if values is None:
        return None
    return {
        name: value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
        for name, value in values.items()
    }


def supported_model(model: ModelInfo, name: str) -> dict[str, Any]:
    """Return the entry for one name of a model. `source` tells whether the weights are the hub's or a fallback."""
    return {
        "model_name": name,
        "alias_of": None if name == model.name else model.name,
        "max_context_length": model.max_context_length or None,
        "trainable": True,
        "sampleable": True,
        "source": model.source,
        "source_hash": model.source_hash or None,
    }


def checkpoint(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{record.kind}/{record.name}",
        "checkpoint_type": CHECKPOINT_TYPES[record.kind],
        "time": time_text(record.created_at),
        "tinker_path": record.path,
        "size_bytes": record.size_bytes,
        "public": record.is_public,
        "user_metadata": metadata(record.user_metadata),
        "expires_at": None if record.expires_at is None else time_text(record.expires_at),
    }


def weights_info(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "base_model": record.base_model,
        "is_lora": True,
        "lora_rank": record.rank,
        "train_unembed": record.train_unembed,
        "train_mlp": record.train_mlp,
        "train_attn": record.train_attn,
        "optimizer_config": {"type": "adamw"},
    }


def training_run(listed: ListedRun, checkpoints: Iterable[CheckpointRecord]) -> dict[str, Any]:
    """Return a run with the newest of its live checkpoints of each kind."""
    run = listed.run
    newest = {saved.kind: saved for saved in sorted(checkpoints, key=lambda saved: saved.created_at)}
    last, last_sampler = newest.get("weights"), newest.get("sampler_weights")
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": owner(run.tenant),
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.rank,
        "lora_config": {**lora_of(run), "seed": run.seed},
        "last_request_time": time_text(run.last_request_at),
        "last_checkpoint": None if last is None else checkpoint(last),
        "last_sampler_checkpoint": None if last_sampler is None else checkpoint(last_sampler),
        "user_metadata": metadata(run.user_metadata),
        "name": run.name,
        "tags": run.tags,
        "status": listed.status,
        "steps": run.steps,
        "loss": run.loss,
        "created_at": time_text(run.created_at),
        "archived_at": None if run.archived_at is None else time_text(run.archived_at),
    }


def run_info(run: RunRecord, model: ModelInfo | None) -> dict[str, Any]:
    """Return what `get_info` reports. `model` is None if the base model of an old run is no longer served."""
    name = run.base_model if model is None else model.name
    arch = None if model is None else model.arch or None
    return {
        "type": "get_info",
        "model_data": {"arch": arch, "model_name": run.base_model, "tokenizer_id": name},
        "model_id": run.id,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": run.rank,
        "model_name": run.base_model,
    }


def sampler(record: SamplerRecord) -> dict[str, Any]:
    return {"sampler_id": record.id, "base_model": record.base_model, "model_path": record.model_path}


def session_status(session: SessionRecord, alive_since: float) -> dict[str, Any] | None:
    """Return whether a session is finished or active; None if it is neither finished nor was seen lately."""
    if session.finished is not None:
        return {"type": "client_finished", "reason": {"type": "success"}, "detail": None, **session.finished}
    return {"type": "active"} if session.seen_at >= alive_since else None


def session_summary(session: SessionRecord, alive_since: float, checkpoints: int, size_bytes: int) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "created_at": time_text(session.created_at),
        "owner": owner(session.tenant),
        "project_id": session.project_id or NO_PROJECT,
        "status": session_status(session, alive_since),
        "checkpoints_count": checkpoints,
        "checkpoint_storage_bytes": size_bytes,
        "display_name": session.display_name,
        "user_metadata": metadata(session.user_metadata),
    }


def audit_entry(entry: AuditEntry) -> dict[str, Any]:
    path = entry.target if entry.target.startswith("tinker://") else None
    return {
        "timestamp": time_text(entry.at),
        "event": entry.action,
        "event_details": entry.detail if path else {"target": entry.target, **entry.detail},
        "model_id": None if path is None else path.removeprefix("tinker://").partition("/")[0],
        "tinker_path": path,
        "purpose": None,
    }


def identity(tenant: str, key: KeyRecord | None) -> dict[str, Any]:
    """Return the owner of a key: for our client and, from `key_id` on, in the form the official CLI's login expects."""
    return {
        "user_urn": owner(tenant),
        "org_urn": ORGANISATION,
        "email": None,
        "key_id": 0 if key is None else int(key.sha256[:12], 16),
        "name": tenant if key is None else key.name,
        "note": "" if key is None else key.hint,
        "details": {
            "org_details": {"name": "tinkex"},
            "user_details": {
                "email": tenant
            },  # the official CLI shows this as the login; there are no e-mail addresses here
        },
    }
