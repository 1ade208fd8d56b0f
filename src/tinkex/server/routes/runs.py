"""Endpoints that list, find, describe, change and delete training runs; and helpers that list what they saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast, get_args

from starlette.responses import Response

from tinkex.rules.run_names import check_run_name, check_tags
from tinkex.server.http import views
from tinkex.server.http.errors import bad_request, json_response, not_found
from tinkex.server.http.fields import require_text
from tinkex.server.http.requests import ApiRequest
from tinkex.server.named_runs import delete_run, find_named
from tinkex.store.records import CheckpointRecord
from tinkex.store.run_records import Archived, ListedRun, RunFilter, RunOrder, RunStatus
from tinkex.store.store import Store

LARGE_FIELDS = frozenset({"user_metadata", "last_checkpoint", "last_sampler_checkpoint"})
"""Left out of a brief list: a page asks for it every few seconds."""
T = TypeVar("T")
_PAGE = 500


async def list_training_runs(request: ApiRequest) -> Response:
    """Return a page of the tenant's runs. `access_scope` makes no difference: a tenant sees only its own runs."""
    service, tenant = request.service, request.tenant
    offset, limit = request.parse_page(20)
    which = read_filter(request)
    now = service.clock.wall()

    def read() -> tuple[list[dict[str, object]], int]:
        runs, total = service.store.list_runs(tenant, offset, limit, which, now)
        return _views(service.store, runs, now), total

    views_of_runs, total = await service.db(read)
    if request.query_params.get("brief") == "true":
        views_of_runs = [{name: view[name] for name in view.keys() - LARGE_FIELDS} for view in views_of_runs]
    return json_response({"training_runs": views_of_runs, "cursor": views.cursor(offset, limit, total)})


def read_filter(request: ApiRequest) -> RunFilter:
    """Return which runs a request wants to list, and in which order; a minus before the order reverses it."""
    query = request.query_params
    for name in ("q", "tag", "base_model"):
        request.check_text(name, query.get(name))
    order = query.get("order") or "created"
    return RunFilter(
        words=query.get("q", ""),
        status=cast(RunStatus | None, _choice("status", query.get("status") or None, (None, *get_args(RunStatus)))),
        tag=query.get("tag") or None,
        base_model=query.get("base_model") or None,
        archived=cast(Archived, _choice("archived", query.get("archived") or "no", get_args(Archived))),
        project_id=query.get("project_id"),
        order=cast(RunOrder, _choice("order", order.removeprefix("-"), get_args(RunOrder))),
        is_reversed=order.startswith("-"),
    )


def _choice(name: str, given: str | None, choices: Sequence[str | None]) -> str | None:
    if given not in choices:
        words = ", ".join(choice for choice in choices if choice)
        raise bad_request(f"{name} is one of {words}, not {str(given)[:50]!r}.", f"bad_{name}")
    return given


async def get_training_run(request: ApiRequest) -> Response:
    run = await request.find_run(request.path_params["run_id"])
    return await _described(request, run.id)


async def find_training_run(request: ApiRequest) -> Response:
    """Return the run that `run` names: an id, the beginning of one, a name, `latest`, or the path of a checkpoint."""
    text = request.query_params.get("run", "")
    request.check_text("run", text)
    run = await find_named(request.service, request.tenant, text)
    return await _described(request, run.id)


async def update_training_run(request: ApiRequest) -> Response:
    """Change the fields that the body has: name, tags, archived."""
    service, body = request.service, await request.read_json()
    run = await request.find_run(request.path_params["run_id"])
    changes: dict[str, Any] = {}
    if "name" in body:
        changes["name"] = check_run_name(body["name"])
    if "tags" in body:
        changes["tags"] = check_tags(body["tags"])
    if "archived" in body:
        if not isinstance(body["archived"], bool):
            raise bad_request("archived must be true or false.", "bad_archived")
        now = service.clock.wall()
        changes["archived_at"] = (run.archived_at or now) if body["archived"] else None
    if changes:
        await service.db(service.store.update_run, run.id, changes)
        await request.write_audit("run.update", run.id, **changes)
    return await _described(request, run.id)


async def delete_training_run(request: ApiRequest) -> Response:
    """Delete a run with all that depends on it. Without `force` only one that has no checkpoints and no work."""
    service = request.service
    run = await request.find_run(request.path_params["run_id"])
    force = _choice("force", request.query_params.get("force", "false").lower(), ("true", "false")) == "true"
    deleted = await delete_run(service, run, request.audit_entry("run.delete", run.id, name=run.name), force=force)
    return json_response(
        {
            "training_run_id": run.id,
            "checkpoints": [saved.path for saved in deleted.checkpoints],
            "samplers": len(deleted.samplers),
            "operations": deleted.operations,
        }
    )


async def _described(request: ApiRequest, run_id: str) -> Response:
    service, now = request.service, request.service.clock.wall()
    listed = await service.db(service.store.describe_run, run_id, now)
    if listed is None:  # deleted a moment ago
        raise not_found("training run", run_id)
    [view] = await service.db(_views, service.store, [listed], now)
    return json_response(view)


async def get_info(request: ApiRequest) -> Response:
    service = request.service
    run = await request.find_run(require_text(await request.read_json(), "model_id"), "model")
    info = views.run_info(run, service.catalog.get(run.base_model))
    is_loaded = service.worker.models.name_of(run.base_model) in service.worker.models.loaded
    # Additions of ours. A client that lost its count (a crash, another process) continues after the last number.
    last_seq_id = await service.db(service.store.last_seq, run.id)
    return json_response({**info, "is_base_model_loaded": is_loaded, "last_seq_id": last_seq_id})


async def get_sampler(request: ApiRequest) -> Response:
    return json_response(views.sampler(await request.find_sampler(request.path_params["sampler_id"])))


def pages(read: Callable[[int, int], tuple[list[T], int]]) -> Iterator[T]:
    """Yield every entry of a list that the store returns in pages."""
    offset = 0
    while True:
        page, total = read(offset, _PAGE)
        yield from page
        offset += len(page)
        if not page or offset >= total:
            return


def checkpoints_of(store: Store, tenant: str, run_id: str | None, now: float) -> Iterator[CheckpointRecord]:
    """Yield all live checkpoints of a run, or of a tenant, newest first."""
    return pages(lambda offset, limit: store.list_checkpoints(tenant, run_id, offset, limit, now))


def checkpoints_in_project(store: Store, tenant: str, project_id: str, now: float) -> list[CheckpointRecord]:
    of_project = RunFilter(archived="all", project_id=project_id)
    listed = pages(lambda offset, limit: store.list_runs(tenant, offset, limit, of_project))
    run_ids = {run.id for run, _ in listed}
    return [saved for saved in checkpoints_of(store, tenant, None, now) if saved.run_id in run_ids]


def _views(store: Store, runs: list[ListedRun], now: float) -> list[dict[str, object]]:
    """Return the views of runs, with one query for the checkpoints of all of them."""
    newest: dict[str, list[CheckpointRecord]] = {run.id: [] for run, _ in runs}
    for saved in store.newest_checkpoints(list(newest), now):
        newest[saved.run_id].append(saved)
    return [views.training_run(listed, newest[listed.run.id]) for listed in runs]
