"""Finds the run, or the weights, that a person names; and deletes a run with all that depends on it."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from tinkex.rules.run_names import LATEST
from tinkex.server.http.errors import RequestRejected, bad_request
from tinkex.server.service import Service
from tinkex.store.errors import HomeLost
from tinkex.store.records import AuditEntry, CheckpointRecord, RunRecord
from tinkex.store.run_records import MOST_CANDIDATES, DeletedRun
from tinkex.types.weights import ParsedCheckpointTinkerPath

MOST_NAMED = 10
"""Checkpoints that an error lists."""
DELETED_AT_ONCE = 1000
"""Operations that one call of the store deletes: some 20 ms. 100,000 at once took seconds, and everybody waited."""


class RunInUse(RequestRejected):
    """A run that is not deleted without `force`: it has checkpoints, or work. Only our own clients delete runs."""

    def __init__(self, detail: str) -> None:
        super().__init__(409, detail, "run_in_use")


async def find_named(service: Service, tenant: str, text: str) -> RunRecord:
    """Return the tenant's run that a text names. Raises 404, or 400 with the candidates if there are several."""
    if text.startswith("tinker://"):
        text = ParsedCheckpointTinkerPath.from_tinker_path(text).training_run_id
    found = await service.db(service.store.find_runs, tenant, text)
    if len(found) == 1:
        return found[0]
    if found:
        listed = "; ".join(f"{run.id} ({run.name})" if run.name else run.id for run in found)
        more = " and more" if len(found) == MOST_CANDIDATES else ""
        raise bad_request(f"Several training runs begin with {text!r}: {listed}{more}. Name one.", "ambiguous_run")
    if text == LATEST:
        raise RequestRejected(404, "There is no training run yet.", "unknown_training_run")
    raise RequestRejected(
        404,
        f"training run {text[:200]!r} is not known: no run has this id or name, or an id that begins with it (four "
        "characters at least). `tinkex run list` shows your runs.",
        "unknown_training_run",
    )


async def weights_named(service: Service, tenant: str, text: str) -> CheckpointRecord:
    """Return the newest weights for sampling of the run that a text names; `latest`: of all runs."""
    now, store = service.clock.wall(), service.store
    if text == LATEST:
        newest = await service.db(store.newest_sampler_weights, tenant, now)
        if newest is not None:
            return newest
        raise RequestRejected(
            404,
            "There are no weights for sampling yet: training.save_weights_for_sampler(name) saves some.",
            "model_not_found",
        )
    try:
        run = await find_named(service, tenant, text)
    except RequestRejected as error:
        if error.status != 404:
            raise
        raise await _unknown_model(service, tenant, text, now) from None
    saved = await service.db(store.newest_checkpoints, [run.id], now)
    newest = next((checkpoint for checkpoint in saved if checkpoint.kind == "sampler_weights"), None)
    if newest is not None:
        return newest
    others = ", ".join(checkpoint.path for checkpoint in saved)
    has = f"It has {others}, which can be trained on but not sampled from. " if others else ""
    raise RequestRejected(
        404,
        f"The run {run.name or run.id} has no weights for sampling. {has}training.save_weights_for_sampler(name) saves "
        "some.",
        "model_not_found",
    )


async def _unknown_model(service: Service, tenant: str, text: str, now: float) -> RequestRejected:
    """Return a 404 that says which names there are."""
    bases = ", ".join(model.name for model in service.catalog.models) or "none"
    saved, _ = await service.db(service.store.list_checkpoints, tenant, None, 0, 100, now)
    paths = [checkpoint.path for checkpoint in saved if checkpoint.kind == "sampler_weights"][:3]
    newest = f"Your newest weights: {', '.join(paths)}. " if paths else ""
    return RequestRejected(
        404,
        f"model {text[:200]!r} is not known. Base models: {bases}. {newest}The id or the name of a run stands for its "
        "newest weights for sampling, `latest` for the newest of all.",
        "model_not_found",
    )


async def delete_run(service: Service, run: RunRecord, entry: AuditEntry, *, force: bool) -> DeletedRun:
    """Delete a run: its rows, then what the engine and the queues have of it, then its files.

    Raises RunInUse without `force` if the run has checkpoints, or operations that wait or run.
    """
    worker, store = service.worker, service.store
    queue = await worker.run_queue(run.id)  # it may have work that this server has not read yet
    if not force:
        kept = await service.db(store.dependents_of, run.id)
        if (reason := _kept_reason(run, kept, is_active=worker.is_active(run.id))) is not None:
            raise RunInUse(reason)
    home = await worker.home(run.id)
    # From now on it takes no operations. If the service ends before the last one is deleted, it is deleted again.
    await service.db(store.set_unloaded, run.id, home)
    if queue is not None:
        queue.run = replace(queue.run, is_unloaded=True)
    ended = 0
    while count := await service.db(store.delete_ended_operations, run.id, DELETED_AT_ONCE, home):
        ended += count
    deleted = await service.db(store.delete_run, run.id, entry, home)
    # What runs at this moment ends without a row, and its result is dropped. An engine that is busy with it for long
    # need not keep the client waiting.
    with contextlib.suppress(HomeLost):
        await worker.forget(run.id)
    for folder in deleted.folders:
        await service.db.beside(store.folders.remove, folder)
    await service.db(store.keep_reserve)
    return deleted._replace(operations=deleted.operations + ended)


def _kept_reason(run: RunRecord, kept: DeletedRun, *, is_active: bool) -> str | None:
    """Return why a run is not deleted without `force`; None if nothing depends on it."""
    reasons = ["is being trained"] if is_active else []
    if kept.checkpoints:
        paths = [saved.path for saved in kept.checkpoints]
        more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
        reasons.append(f"has {_counted(len(paths), 'checkpoint')}: {', '.join(paths[:MOST_NAMED])}{more}")
    if kept.samplers:
        reasons.append(f"has {_counted(len(kept.samplers), 'sampler')}")
    if not reasons:
        return None
    return f"The run {run.name or run.id} {', '.join(reasons)}. With force=true they are deleted with it."


def _counted(many: int, noun: str) -> str:
    return f"{many} {noun}{'' if many == 1 else 's'}"
