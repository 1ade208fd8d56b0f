"""Endpoints for the console and `tinkex run watch`: a run's steps, the queue, failed operations of the tenant."""

from __future__ import annotations

from starlette.responses import Response

from tinkex._version import __version__
from tinkex.server.http import views
from tinkex.server.http.errors import bad_request, json_response
from tinkex.server.http.requests import ApiRequest
from tinkex.server.service import Service
from tinkex.server.training.intake import MAX_SEQ
from tinkex.server.training.run_queue import PendingOperation
from tinkex.server.training.steps import steps_of, thinned
from tinkex.store.records import OperationRecord

MAX_OPERATIONS = 5000
MAX_QUEUED_SHOWN = 100


async def run_steps(request: ApiRequest) -> Response:
    service = request.service
    run = await request.find_run(request.path_params["run_id"])
    try:
        after = min(max(int(request.query_params.get("after_seq_id", -1)), -1), MAX_SEQ)
        most_steps = int(request.query_params.get("most_steps", MAX_OPERATIONS))
    except ValueError:
        raise bad_request("after_seq_id and most_steps must be whole numbers.", "bad_page") from None
    is_active = service.worker.is_active(run.id)  # before the rows: a client that reads "idle" has read all steps
    rows = await service.db(service.store.done_since, run.id, after, MAX_OPERATIONS)
    steps, open_passes = steps_of(rows, is_cut=len(rows) == MAX_OPERATIONS)
    return json_response(
        {
            "steps": thinned(steps, most_steps),
            "count": len(steps),
            "next_seq_id": steps[-1]["seq_id"] if steps else after,
            "open_passes": open_passes,
            "is_active": is_active,
        }
    )


async def service_state(request: ApiRequest) -> Response:
    service, tenant = request.service, request.tenant
    engine, worker = service.engine.state, service.worker
    checkpoints, size_bytes = await service.db(service.store.usage, tenant)
    uses_keys = await service.access.uses_keys()
    own = worker.waiting(tenant)  # after every await: operations that ended meanwhile are not in it
    return json_response(
        {
            "version": __version__,
            "tenant": tenant,
            "uses_keys": uses_keys,
            "is_ready": engine.is_ready and worker.pause_reason is None,
            "reason": worker.pause_reason or "" if engine.is_ready else engine.reason or "The engine is starting.",
            "models": service.catalog.names,
            "queue": [_queued(service, row) for row in own[:MAX_QUEUED_SHOWN]],
            "queued_operations": len(own),
            "queued_operations_of_others": worker.queued - len(own),
            "queued_samples": service.sampling.queued,
            "running_samples": service.sampling.running,
            "adapters": len(worker.resident()),
            "engine_bytes": engine.rss_bytes,
            "engine_restarts": max(engine.generation - 1, 0),
            "checkpoints": checkpoints,
            "checkpoint_bytes": size_bytes,
        }
    )


async def failed_operations(request: ApiRequest) -> Response:
    service, tenant = request.service, request.tenant
    offset, limit = request.parse_page(50)
    rows, total = await service.db(service.store.failures, tenant, offset, limit)
    return json_response({"operations": [_failed(row) for row in rows], "cursor": views.cursor(offset, limit, total)})


def _queued(service: Service, pending: PendingOperation) -> dict[str, object]:
    state, reason = service.worker.queue_of(pending)
    return {
        "run_id": pending.row.run_id,
        "seq_id": pending.row.seq_id,
        "kind": pending.row.kind,
        "tokens": pending.row.tokens,
        "waiting_s": service.clock.now() - pending.arrived,
        "state": state,
        "reason": reason,
    }


def _failed(row: OperationRecord) -> dict[str, object]:
    return {
        "request_id": row.request_id,
        "run_id": row.run_id,
        "seq_id": row.seq_id,
        "kind": row.kind,
        "state": row.state,
        "time": views.time_text(row.finished_at or row.created_at),
        "error": row.error or "",
        "category": row.category or "",
    }
