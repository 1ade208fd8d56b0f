"""Endpoints about the service and the tenant's account: settings, health, models, keys, the audit log, usage."""

from __future__ import annotations

import datetime as dt

from starlette.responses import Response

from tinkex._version import __version__
from tinkex.rules import ranges
from tinkex.server.http import views
from tinkex.server.http.access import api_key_in
from tinkex.server.http.errors import bad_request, json_response
from tinkex.server.http.requests import ApiRequest
from tinkex.server.routes.health import readyz
from tinkex.server.routes.runs import checkpoints_in_project
from tinkex.store.records import AuditEntry
from tinkex.store.store import Store

SAMPLE_USE_RETRIEVE_FUTURES = False
"""Whether clients from 0.27 on poll for many samples with one call. Off until a measurement shows that it is better."""
FWDBWD_MAX_CHUNK_BYTES = 5_000_000
SAMPLE_MAX_CONCURRENT = 2000
_MAX_AUDIT_ENTRIES = 10_000


async def client_config(request: ApiRequest) -> Response:
    config = request.service.config
    return json_response(
        {
            # One chunk at a time: official clients would otherwise send later chunks first.
            "parallel_fwdbwd_chunks": False,
            "custom_loss_server_side": False,
            "proto_compress_fwdbwd": False,
            "pjwt_auth_enabled": False,
            "sample_use_retrieve_futures": SAMPLE_USE_RETRIEVE_FUTURES,
            "fwdbwd_max_chunk_len": ranges.MAX_DATUMS,
            "fwdbwd_max_chunk_bytes_count": min(FWDBWD_MAX_CHUNK_BYTES, config.max_body_bytes // 2),
            "sample_max_concurrent_requests": min(SAMPLE_MAX_CONCURRENT, config.max_queued_samples),
            "tinkex": {"version": __version__, "stream": True, "tokenizers": True, "run_records": True},
        }
    )


async def client_dynamic_config(request: ApiRequest) -> Response:
    return json_response(
        {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}
    )


async def auth_token(request: ApiRequest) -> Response:
    raise bad_request(
        "This service issues no tokens: send the API key itself with every request (client/config says so).",
        "no_tokens",
    )


async def healthz(request: ApiRequest) -> Response:
    """Return 200 only if the service can work, for clients; otherwise 503. `/livez` and `/readyz` are for operators."""
    return await readyz(request)


async def get_server_capabilities(request: ApiRequest) -> Response:
    models, others = request.service.catalog.models, request.service.others
    own = [views.supported_model(model, name) for model in models for name in model.names]
    return json_response({"supported_models": own if others is None else await others.capabilities()})


async def create_custom_loss(request: ApiRequest) -> Response:
    raise bad_request(
        "Losses that run on the service are not offered here: a client could send any code. "
        "Use forward_backward_custom, which computes the loss on your side.",
        "no_server_side_losses",
    )


# -- keys ------------------------------------------------------------------------------------------------------------


async def whoami(request: ApiRequest) -> Response:
    key = await request.service.access.stored_key(api_key_in(request.headers.raw))
    return json_response(views.identity(request.tenant, key))


async def revoke_key(request: ApiRequest) -> Response:
    """Revoke the key that the request carries, and no other."""
    key = await request.service.access.revoke(api_key_in(request.headers.raw))
    await request.write_audit("key.revoke", key.hint)
    return json_response(None)


# -- the audit log ---------------------------------------------------------------------------------------------------


async def audit_log(request: ApiRequest) -> Response:
    """Return the events of one day (UTC; today by default), oldest first."""
    service = request.service
    event_type = request.query_params.get("event_type", "all")
    day = request.query_params.get("day")
    try:
        date = dt.date.fromisoformat(day) if day else dt.datetime.fromtimestamp(service.clock.wall(), dt.UTC).date()
    except ValueError:
        raise bad_request(f"day must be a date such as 2026-01-31, not {day!r}.", "bad_day") from None
    start = dt.datetime.combine(date, dt.time(), dt.UTC).timestamp()
    entries = await service.db(_audit_of, service.store, request.tenant, start, start + 86400)
    noun = "" if event_type == "all" else event_type.removesuffix("s") + "."
    return json_response({"entries": [views.audit_entry(entry) for entry in entries if entry.action.startswith(noun)]})


def _audit_of(store: Store, tenant: str, start: float, end: float) -> list[AuditEntry]:
    entries = store.list_audit(tenant, limit=_MAX_AUDIT_ENTRIES, before=end)
    return sorted((entry for entry in entries if entry.at >= start), key=lambda entry: (entry.at, entry.id))


# -- usage -----------------------------------------------------------------------------------------------------------


async def billing_usage(request: ApiRequest) -> Response:
    raise bad_request(
        "A self-hosted service has no billing, so there are no usage events. "
        "/metrics counts tokens and requests, and the usage of checkpoint storage is measured.",
        "no_billing",
    )


async def checkpoint_storage_usage(request: ApiRequest) -> Response:
    service, tenant = request.service, request.tenant
    project_id = request.query_params.get("project_id")
    if project_id is None:
        count, size = await service.db(service.store.usage, tenant)
    else:
        saved = await service.db(checkpoints_in_project, service.store, tenant, project_id, service.clock.wall())
        count, size = len(saved), sum(checkpoint.size_bytes for checkpoint in saved)
    item = {
        "project_id": project_id,
        "org_user_urn": views.owner(tenant),
        "user_name": tenant,
        "checkpoint_count": count,
        "size_bytes": size,
        "size_gigabytes": size / 1e9,
    }
    return json_response({"data": [item]})
