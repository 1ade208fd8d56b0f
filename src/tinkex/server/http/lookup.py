"""Finds what a request names, and reads the fields that several calls share.

Objects of other tenants are reported as not found, with the same message as objects that do not exist.
"""

from __future__ import annotations

from typing import Any

import orjson

from tinkex.rules.limits import check_ttl
from tinkex.server.http.errors import bad_request, not_found
from tinkex.server.service import Service
from tinkex.store.records import CheckpointRecord, RunRecord, SamplerRecord, SessionRecord
from tinkex.types.weights import ParsedCheckpointTinkerPath

MAX_METADATA_BYTES = 64 * 1024
"""Metadata is read with every list."""


async def find_session(service: Service, tenant: str, session_id: str) -> SessionRecord:
    session = await service.db(service.store.get_session, session_id)
    if session is None or session.tenant != tenant:
        raise not_found("session", session_id)
    return session


async def find_run(service: Service, tenant: str, run_id: str, noun: str = "training run") -> RunRecord:
    run = await service.db(service.store.get_run, run_id)
    if run is None or run.tenant != tenant:
        raise not_found(noun, run_id)
    return run


async def find_sampler(service: Service, tenant: str, sampler_id: str) -> SamplerRecord:
    sampler = await service.db(service.store.get_sampler, sampler_id)
    if sampler is None or sampler.tenant != tenant:
        raise not_found("sampling session", sampler_id)
    return sampler


async def find_own_checkpoint(service: Service, tenant: str, path: str) -> CheckpointRecord:
    """Return a checkpoint that this tenant may change."""
    checkpoint = await service.db(service.store.get_live_checkpoint, path, service.clock.wall())
    if checkpoint is None or checkpoint.tenant != tenant:
        raise not_found("checkpoint", path)
    return checkpoint


async def find_readable_checkpoint(service: Service, tenant: str, path: str) -> CheckpointRecord:
    """Return a checkpoint that this tenant may read: its own, or one that its owner published."""
    checkpoint = await service.db(service.store.get_readable_checkpoint, path, tenant, service.clock.wall())
    if checkpoint is None:
        raise not_found("checkpoint", path)
    return checkpoint


def require_text(body: dict[str, Any], name: str) -> str:
    """Return a field that must be present and be text."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{name} is missing: it must be text.", "invalid")
    return value


def require_checkpoint_path(body: dict[str, Any], name: str) -> str:
    """Return a field that must be the path of a checkpoint."""
    return ParsedCheckpointTinkerPath.from_tinker_path(require_text(body, name)).tinker_path


def parse_metadata(body: dict[str, Any]) -> dict[str, Any]:
    metadata = body.get("user_metadata") or {}
    if not isinstance(metadata, dict) or len(orjson.dumps(metadata)) > MAX_METADATA_BYTES:
        raise bad_request(
            f"user_metadata must be an object of at most {MAX_METADATA_BYTES} bytes as JSON.", "bad_metadata"
        )
    return metadata


def parse_ttl(body: dict[str, Any]) -> int | None:
    return check_ttl(body.get("ttl_seconds"))
