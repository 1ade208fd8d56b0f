"""Finding what a request names. What belongs to another tenant is not known, in the same words as what never was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from tinkex.rules.limits import check_ttl
from tinkex.server.http.errors import bad, not_found
from tinkex.store.records import Checkpoint, Run, Sampler, Session
from tinkex.types.weights import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinkex.server.service import Service

MOST_METADATA_BYTES = 64 * 1024
"""Metadata is read with every list."""


async def own_session(service: Service, tenant: str, session_id: str) -> Session:
    found = await service.db(service.store.get_session, session_id)
    if found is None or found.tenant != tenant:
        raise not_found("session", session_id)
    return found


async def own_run(service: Service, tenant: str, run_id: str, what: str = "training run") -> Run:
    found = await service.db(service.store.get_run, run_id)
    if found is None or found.tenant != tenant:
        raise not_found(what, run_id)
    return found


async def own_sampler(service: Service, tenant: str, sampler_id: str) -> Sampler:
    found = await service.db(service.store.get_sampler, sampler_id)
    if found is None or found.tenant != tenant:
        raise not_found("sampling session", sampler_id)
    return found


async def own_checkpoint(service: Service, tenant: str, path: str) -> Checkpoint:
    """A checkpoint that this tenant may change."""
    found = await live_checkpoint(service, path)
    if found is None or found.tenant != tenant:
        raise not_found("checkpoint", path)
    return found


async def readable_checkpoint(service: Service, tenant: str, path: str) -> Checkpoint:
    """A checkpoint that this tenant may read: its own, or anybody's published one."""
    found = await live_checkpoint(service, path)
    if found is None or not (found.tenant == tenant or found.is_public):
        raise not_found("checkpoint", path)
    return found


async def live_checkpoint(service: Service, path: str) -> Checkpoint | None:
    """Whoever's it is. One that has expired is gone at once, whether or not it was tidied away."""
    found = await service.db(service.store.get_checkpoint, path)
    if found is None or (found.expires_at is not None and found.expires_at <= service.clock.wall()):
        return None
    return found


def text_in(body: dict[str, Any], name: str) -> str:
    """A field that has to be there and be text."""
    found = body.get(name)
    if not isinstance(found, str) or not found:
        raise bad(f"{name} is missing: it must be text.", "invalid")
    return found


def path_in(body: dict[str, Any], name: str) -> str:
    """A field that has to be the path of a checkpoint."""
    return ParsedCheckpointTinkerPath.from_tinker_path(text_in(body, name)).tinker_path


def metadata_in(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("user_metadata") or {}
    if not isinstance(found, dict) or len(orjson.dumps(found)) > MOST_METADATA_BYTES:
        raise bad(f"user_metadata must be an object of at most {MOST_METADATA_BYTES} bytes as JSON.", "bad_metadata")
    return found


def ttl_in(body: dict[str, Any]) -> int | None:
    return check_ttl(body.get("ttl_seconds"))
