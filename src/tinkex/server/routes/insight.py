"""Endpoints for the console and `tinkex run watch`: a run's steps, the queue, failed operations of the tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from tinkex._version import __version__
from tinkex.server.http import views
from tinkex.server.http.errors import bad_request, json_response
from tinkex.server.http.requests import ApiRequest
from tinkex.server.service import Service
from tinkex.server.training.intake import MAX_SEQ
from tinkex.server.training.run_queue import PendingOperation
from tinkex.server.training.steps import picked, settled, steps_of
from tinkex.store.records import OperationRecord
from tinkex.store.store import Store

MAX_OPERATIONS = 5000
MAX_QUEUED_SHOWN = 100


async def run_steps(request: ApiRequest) -> Response:
    """Return the steps of a run in a range of numbers: all of them, in pages, or about `most_steps` of them at once."""
    service = request.service
    run = await request.find_run(request.path_params["run_id"])
    try:
        after = min(max(int(request.query_params.get("after_seq_id", -1)), -1), MAX_SEQ)
        before = min(max(int(request.query_params.get("before_seq_id", MAX_SEQ + 1)), 0), MAX_SEQ + 1)
        most_steps = min(max(int(request.query_params.get("most_steps", MAX_OPERATIONS)), 1), MAX_OPERATIONS)
    except ValueError:
        raise bad_request("after_seq_id, before_seq_id and most_steps must be whole numbers.", "bad_page") from None
    is_active = service.worker.is_active(run.id)  # before the rows: a client that reads "idle" has read all steps
    found = await service.db(_some_of, service.store, run.id, after, before, most_steps)
    if found is None:
        steps, open_passes = await steps_after(service, run.id, after, before)
        next_seq_id = steps[-1]["seq_id"] if steps else after
        found = {"steps": steps, "count": len(steps), "next_seq_id": next_seq_id, "open_passes": open_passes}
    if request.query_params.get("only") == "loss":
        found["steps"] = [{"seq_id": step["seq_id"], "loss": step["loss"]} for step in found["steps"]]
    homes = {} if service.others is None else await service.others.urls_of([run.id])
    return json_response({**found, "is_active": is_active, "home": homes.get(run.id)})


def _some_of(store: Store, run_id: str, after: int, before: int, most_steps: int) -> dict[str, Any] | None:
    """Return every n-th step, so that there are at most so many; None if there are no more than that."""
    end = min(before, store.last_done(run_id) + 1)
    total = store.count_steps(run_id, after, end)
    if total <= most_steps:
        return None
    steps = picked(store.pick_steps(run_id, after, end, total, -(-total // most_steps)))
    return {"steps": steps, "count": total, "next_seq_id": steps[-1]["seq_id"], "open_passes": 0, "is_thinned": True}


async def steps_after(
    service: Service, run_id: str, after: int, before: int = MAX_SEQ + 1
) -> tuple[list[dict[str, Any]], int]:
    """Return the next steps of a run, and how many forward_backward calls follow the last of them."""
    # With the last operation before: what comes next did not wait while that one ran.
    rows = await service.db(service.store.ended_since, run_id, after, MAX_OPERATIONS)
    is_cut = len(rows) == MAX_OPERATIONS
    previous = rows.pop(0) if rows and rows[0].seq_id == after else None
    ended = [row for row in settled(rows, after) if row.seq_id < before]
    return steps_of(ended, is_cut=is_cut, before=previous)


async def service_state(request: ApiRequest) -> Response:
    """Return what the service does. Where several servers share a store, the sum of all of them."""
    service, tenant = request.service, request.tenant
    own, others = await _state_of(service, tenant), service.others
    if others is None or request.scope["state"].get("is_hop"):
        return json_response(own)
    summed = _sum_of(own, await others.states(tenant), has_engine=not service.config.no_engine)
    models = [row["model_name"] for row in await others.capabilities()]
    return json_response({**summed, "models": models, "nodes": await others.nodes()})


async def _state_of(service: Service, tenant: str) -> dict[str, Any]:
    engine, worker = service.engine.state, service.worker
    checkpoints, size_bytes = await service.db(service.store.usage, tenant)
    uses_keys = await service.access.uses_keys()
    engines = await service.engines()
    own = worker.waiting(tenant)  # after every await: operations that ended meanwhile are not in it
    return {
        "version": __version__,
        "tenant": tenant,
        "uses_keys": uses_keys,
        "is_ready": engine.is_ready and worker.pause_reason is None,
        "reason": worker.pause_reason or "" if engine.is_ready else engine.reason or "The engine is starting.",
        "models": service.catalog.names,
        "base_models": [worker.models.status(model) for model in service.catalog.models],
        "base_model_budget_bytes": worker.models.budget_bytes,
        "queue": [_queued(service, row, engines) for row in own[:MAX_QUEUED_SHOWN]],
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


SUMMED = (
    "queued_operations", "queued_operations_of_others", "queued_samples", "running_samples", "adapters", "engine_bytes",
    "engine_restarts",
)  # fmt: skip


def _sum_of(own: dict[str, Any], others: Sequence[dict[str, Any]], *, has_engine: bool) -> dict[str, Any]:
    """Return the state of a cluster, from that of the server that responds and those of the other nodes."""
    ready = [state for state in others if state["is_ready"]]
    engines = [own, *others] if has_engine else others
    is_ready = (has_engine and own["is_ready"]) or bool(ready)
    reasons = [state["reason"] for state in engines if state["reason"]] or ["No node of this service lives."]
    queue = sorted((row for state in (own, *others) for row in state["queue"]), key=lambda row: -row["waiting_s"])
    return {
        **own,
        **{name: own[name] + sum(state[name] for state in others) for name in SUMMED},
        "is_ready": is_ready,
        "reason": "" if is_ready else reasons[0],
        "queue": queue[:MAX_QUEUED_SHOWN],
    }


async def failed_operations(request: ApiRequest) -> Response:
    service, tenant = request.service, request.tenant
    offset, limit = request.parse_page(50)
    run_id = request.query_params.get("run_id") or None
    rows, total = await service.db(service.store.failures, tenant, offset, limit, run_id)
    return json_response({"operations": [_failed(row) for row in rows], "cursor": views.cursor(offset, limit, total)})


def _queued(service: Service, pending: PendingOperation, engines: str) -> dict[str, object]:
    state, reason = service.queue_of(pending, engines)
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
