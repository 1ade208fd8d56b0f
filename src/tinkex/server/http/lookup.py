"""Finding what a request names. What belongs to another tenant is not known, in the same words as what never was."""

from __future__ import annotations

from typing import Any

import orjson

from tinkex.server.http.errors import bad_request, not_found
from tinkex.server.service import Service
from tinkex.store.records import CheckpointRecord, RunRecord, SamplerRecord, SessionRecord
from tinkex.types.weights import ParsedCheckpointTinkerPath

MAX_TTL_S = 100 * 365 * 86400
MAX_METADATA_BYTES = 64 * 1024
"""Metadata is read with every list."""


async def find_session(service: Service, tenant: str, session_id: str) -> SessionRecord:
    found = await service.db(service.store.get_session, session_id)
    if found is None or found.tenant != tenant:
        raise not_found("session", session_id)
    return found


async def find_run(service: Service, tenant: str, run_id: str, what: str = "training run") -> RunRecord:
    found = await service.db(service.store.get_run, run_id)
    if found is None or found.tenant != tenant:
        raise not_found(what, run_id)
    return found


async def find_sampler(service: Service, tenant: str, sampler_id: str) -> SamplerRecord:
    found = await service.db(service.store.get_sampler, sampler_id)
    if found is None or found.tenant != tenant:
        raise not_found("sampling session", sampler_id)
    return found


async def find_own_checkpoint(service: Service, tenant: str, path: str) -> CheckpointRecord:
    """A checkpoint that this tenant may change."""
    found = await find_live_checkpoint(service, path)
    if found is None or found.tenant != tenant:
        raise not_found("checkpoint", path)
    return found


async def find_readable_checkpoint(service: Service, tenant: str, path: str) -> CheckpointRecord:
    """A checkpoint that this tenant may read: its own, or anybody's published one."""
    found = await find_live_checkpoint(service, path)
    if found is None or not (found.tenant == tenant or found.is_public):
        raise not_found("checkpoint", path)
    return found


async def find_live_checkpoint(service: Service, path: str) -> CheckpointRecord | None:
    """Whoever's it is. One that has expired is gone at once, whether or not it was tidied away."""
    found = await service.db(service.store.get_checkpoint, path)
    if found is None or (found.expires_at is not None and found.expires_at <= service.clock.wall()):
        return None
    return found


def require_text(body: dict[str, Any], name: str) -> str:
    """A field that has to be there and be text."""
    found = body.get(name)
    if not isinstance(found, str) or not found:
        raise bad_request(f"{name} is missing: it must be text.", "invalid")
    return found


def require_checkpoint_path(body: dict[str, Any], name: str) -> str:
    """A field that has to be the path of a checkpoint."""
    return ParsedCheckpointTinkerPath.from_tinker_path(require_text(body, name)).tinker_path


def parse_metadata(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("user_metadata") or {}
    if not isinstance(found, dict) or len(orjson.dumps(found)) > MAX_METADATA_BYTES:
        raise bad_request(
            f"user_metadata must be an object of at most {MAX_METADATA_BYTES} bytes as JSON.", "bad_metadata"
        )
    return found


def parse_ttl(body: dict[str, Any]) -> int | None:
    ttl_s = body.get("ttl_seconds")
    if ttl_s is not None and (isinstance(ttl_s, bool) or not isinstance(ttl_s, int) or not 0 < ttl_s <= MAX_TTL_S):
        raise bad_request(
            f"ttl_seconds must be a whole number from 1 to {MAX_TTL_S}, or null to keep it for good.", "bad_ttl"
        )
    return ttl_s
