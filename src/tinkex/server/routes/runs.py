"""Endpoints that describe training runs and samplers, and helpers that list what they saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from starlette.responses import Response

from tinkex.server.http import views
from tinkex.server.http.errors import json_response
from tinkex.server.http.fields import require_text
from tinkex.server.http.requests import ApiRequest
from tinkex.store.records import CheckpointRecord, RunRecord
from tinkex.store.store import Store

T = TypeVar("T")
_PAGE = 500


async def list_training_runs(request: ApiRequest) -> Response:
    """Return a page of the tenant's runs. `access_scope` makes no difference: a tenant sees only its own runs."""
    service, tenant = request.service, request.tenant
    offset, limit = request.parse_page(20)
    project_id = request.query_params.get("project_id")
    now = service.clock.wall()

    def read() -> tuple[list[dict[str, object]], int]:
        runs, total = service.store.list_runs(tenant, offset, limit, project_id)
        return _views(service.store, runs, now), total

    views_of_runs, total = await service.db(read)
    return json_response({"training_runs": views_of_runs, "cursor": views.cursor(offset, limit, total)})


async def get_training_run(request: ApiRequest) -> Response:
    service = request.service
    run = await request.find_run(request.path_params["run_id"])
    [view] = await service.db(_views, service.store, [run], service.clock.wall())
    return json_response(view)


async def get_info(request: ApiRequest) -> Response:
    service = request.service
    run = await request.find_run(require_text(await request.read_json(), "model_id"), "model")
    info = views.run_info(run, service.catalog.get(run.base_model))
    # An addition of ours: a client that lost its count (a crash, another process) continues after this number.
    return json_response({**info, "last_seq_id": await service.db(service.store.last_seq, run.id)})


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
    run_ids = {run.id for run in pages(lambda offset, limit: store.list_runs(tenant, offset, limit, project_id))}
    return [saved for saved in checkpoints_of(store, tenant, None, now) if saved.run_id in run_ids]


def _views(store: Store, runs: list[RunRecord], now: float) -> list[dict[str, object]]:
    """Return the views of runs, with one query for the checkpoints of all of them."""
    newest: dict[str, list[CheckpointRecord]] = {run.id: [] for run in runs}
    for saved in store.newest_checkpoints(list(newest), now):
        newest[saved.run_id].append(saved)
    return [views.training_run(run, newest[run.id]) for run in runs]
