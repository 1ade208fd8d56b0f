"""The store of runs as people see them: lists, searches, names, tags and archive; and how a run is deleted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Text,
    and_,
    case,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    type_coerce,
    update,
)

from tinkex.rules.run_names import LATEST, LEAST_PREFIX
from tinkex.store.database import as_record, bounded, values_of
from tinkex.store.journal import Journal
from tinkex.store.records import AuditEntry, CheckpointRecord, Home, RunRecord, SamplerRecord
from tinkex.store.runs.logged_store import delete_logged
from tinkex.store.tables import audit, checkpoints, operations, payloads, runs, safe_text, samplers, sessions

RunStatus = Literal["running", "idle", "finished", "failed"]
RunOrder = Literal["created", "last_request", "name", "steps", "loss"]
Archived = Literal["no", "only", "all"]
RUNNING_S = 60.0
"""How long a run counts as running after an operation: a program that samples between its steps trains all the same."""
MOST_WORDS = 16
"""Words of a search that count: each looks at all runs of the tenant."""
MOST_CANDIDATES = 10
"""Runs that an error names when the beginning of an id is that of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs to list, and in which order."""

    words: str = ""
    """Each must be in the name, the id, the base model or a tag, in any case of letters."""
    status: RunStatus | None = None
    tag: str | None = None
    base_model: str | None = None
    archived: Archived = "no"
    project_id: str | None = None
    order: RunOrder = "created"
    is_reversed: bool = False


ALL_RUNS = RunFilter(archived="all")


class ListedRun(NamedTuple):
    run: RunRecord
    status: RunStatus


class DeletedRun(NamedTuple):
    """What was deleted with a run, or what keeps it from being deleted."""

    checkpoints: list[CheckpointRecord]
    samplers: list[SamplerRecord]
    operations: int
    folders: list[str]
    """Those that no row refers to any more."""


class RunStore(Journal):
    def list_runs(
        self, tenant: str, offset: int, limit: int, which: RunFilter = ALL_RUNS, now: float = 0.0
    ) -> tuple[list[ListedRun], int]:
        """Return a page of a tenant's runs, and how many there are in all."""
        query = select(runs.c.id).where(runs.c.tenant == tenant, *_conditions(which, now))
        with self._read() as connection:
            page = query.order_by(*_order(which)).offset(bounded(offset)).limit(bounded(limit))
            ids = connection.scalars(page).all()
            total = connection.scalar(select(func.count()).select_from(query.subquery()))
            listed = _described(connection, ids, now)
        return listed, int(total or 0)

    def describe_run(self, run_id: str, now: float) -> ListedRun | None:
        with self._read() as connection:
            return next(iter(_described(connection, [run_id], now)), None)

    def find_runs(self, tenant: str, text: str) -> list[RunRecord]:
        """Return the run that a text names: none, one, or those whose ids begin so.

        It is an id, `latest`, a name (of the newest run that has it), the beginning of an id, or that with the number
        of the run in its session behind it (1f6b:0). `latest` is the run that was used last, not counting archived
        ones if there are others.
        """
        text = safe_text(text)
        own = select(runs).where(runs.c.tenant == tenant)
        newest = (runs.c.created_at.desc(), runs.c.id.desc())
        if text == LATEST:
            is_archived = runs.c.archived_at.is_not(None)
            return self._all(RunRecord, own.order_by(is_archived, runs.c.last_request_at.desc(), *newest).limit(1))
        for query in (own.where(runs.c.id == text), own.where(runs.c.name == text).order_by(*newest)):
            if (run := self._first(RunRecord, query.limit(1))) is not None:
                return [run]
        beginning, separator, number = text.rpartition(":")
        has_number = separator and number.isdecimal() and len(beginning) >= LEAST_PREFIX
        if len(text) < LEAST_PREFIX:
            return []
        begins = _begins(runs.c.id, text)
        if has_number:
            begins = or_(begins, and_(_begins(runs.c.id, beginning), runs.c.id.endswith(f":train:{number}")))
        return self._all(RunRecord, own.where(begins).order_by(*newest).limit(MOST_CANDIDATES))

    def update_run(self, run_id: str, changes: dict[str, Any]) -> None:
        """Change name, tags or archived_at. Any server may: the work on the run depends on none of them."""
        assert changes.keys() <= {"name", "tags", "archived_at"}
        self._run_write(update(runs).where(runs.c.id == run_id).values(**changes))

    def dependents_of(self, run_id: str) -> DeletedRun:
        """Return what would be deleted with a run."""
        with self._read() as connection:
            return _dependents(connection, run_id)

    def delete_ended_operations(self, run_id: str, most: int, home: Home | None = None) -> int:
        """Delete the oldest operations of a run that is to be deleted, and return how many: a whole journal may be so
        long that others would wait for seconds. The run must be unloaded: it cannot be rebuilt any more."""
        return self._use_reserve(lambda: self._delete_ended_operations(run_id, most, home))

    def _delete_ended_operations(self, run_id: str, most: int, home: Home | None) -> int:
        ended = (operations.c.run_id == run_id, operations.c.state != "queued")
        oldest = select(operations.c.request_id).where(*ended).order_by(operations.c.seq_id).limit(most)
        with self._write() as connection:
            self._check_home(connection, run_id, home)
            ids = connection.scalars(oldest).all()
            journal = delete(payloads).where(payloads.c.request_id.in_(ids)).returning(payloads.c.file)
            files = connection.scalars(journal).all()
            connection.execute(delete(operations).where(operations.c.request_id.in_(ids)))
        self._payloads.remove(files)
        return len(ids)

    def delete_run(self, run_id: str, entry: AuditEntry, home: Home | None = None) -> DeletedRun:
        """Delete a run with its journal, its checkpoints and the samplers of them. Works on a full disk too.

        The files of the returned folders are the caller's to delete: the rows go first, so that a crash in between
        leaves folders without rows, which the janitor deletes.
        """
        return self._use_reserve(lambda: self._delete_run(run_id, entry, home))

    def _delete_run(self, run_id: str, entry: AuditEntry, home: Home | None) -> DeletedRun:
        with self._write() as connection:
            self._check_home(connection, run_id, home)
            deleted = _dependents(connection, run_id)
            of_run = select(operations.c.request_id).where(operations.c.run_id == run_id)
            journal = delete(payloads).where(payloads.c.request_id.in_(of_run)).returning(payloads.c.file)
            files = connection.scalars(journal).all()
            connection.execute(delete(operations).where(operations.c.run_id == run_id))
            connection.execute(delete(checkpoints).where(checkpoints.c.run_id == run_id))
            for sampler in deleted.samplers:
                connection.execute(delete(samplers).where(samplers.c.id == sampler.id))
            delete_logged(connection, run_id)
            connection.execute(delete(runs).where(runs.c.id == run_id))
            connection.execute(insert(audit), values_of(entry))
        self._payloads.remove(files)
        return deleted


def status_of(now: float) -> ColumnElement[str]:
    """Return the status of a run in a query of `runs`: the one rule, for lists, filters and single runs."""
    of_run = operations.c.run_id == runs.c.id
    last = select(operations.c.state).where(of_run, operations.c.state.in_(("done", "failed")))
    newest = operations.c.seq_id.desc()
    waits = select(operations.c.run_id).where(operations.c.state == literal_column("'queued'"))  # for the partial index
    ended_at = select(operations.c.finished_at).where(of_run, operations.c.state.in_(("done", "failed")))
    of_session = select(type_coerce(sessions.c.finished, Text)).where(sessions.c.id == runs.c.session_id)
    finished = of_session.scalar_subquery()
    return case(
        (runs.c.id.in_(waits), "running"),
        (ended_at.order_by(newest).limit(1).scalar_subquery() >= now - RUNNING_S, "running"),
        (last.order_by(newest).limit(1).scalar_subquery() == "failed", "failed"),
        # The text of the JSON that `finish_session` stores. Inside of a value, quotation marks have backslashes.
        (finished.contains('"type":"errored"'), "failed"),
        (or_(finished.is_not(None), runs.c.is_unloaded), "finished"),
        else_="idle",
    )


def _described(connection: Connection, ids: Sequence[str], now: float) -> list[ListedRun]:
    """Return runs with their status, in the order of their ids."""
    query = select(runs, status_of(now).label("status")).where(runs.c.id.in_(ids))
    found = {}
    for row in connection.execute(query):
        values = dict(row._mapping)
        status = values.pop("status")
        found[row.id] = ListedRun(RunRecord(**values), status)
    return [found[run_id] for run_id in ids if run_id in found]


def _conditions(which: RunFilter, now: float) -> Iterable[ColumnElement[bool]]:
    if which.archived != "all":
        yield runs.c.archived_at.is_(None) if which.archived == "no" else runs.c.archived_at.is_not(None)
    if which.project_id is not None:
        yield runs.c.session_id.in_(select(sessions.c.id).where(sessions.c.project_id == which.project_id))
    if which.base_model is not None:
        yield runs.c.base_model == which.base_model
    tags = type_coerce(runs.c.tags, Text)
    if which.tag is not None:
        yield func.lower(tags).contains(orjson.dumps(safe_text(which.tag.lower())).decode(), autoescape=True)
    everything = func.lower(func.coalesce(runs.c.name, "") + "\n" + runs.c.id + "\n" + runs.c.base_model + "\n" + tags)
    for word in safe_text(which.words.lower()).split()[:MOST_WORDS]:
        yield everything.contains(word, autoescape=True)
    if which.status is not None:
        yield status_of(now) == which.status


def _order(which: RunFilter) -> list[ColumnElement[Any]]:
    """Return the columns to sort by. What a run does not have comes last, whichever way round."""
    newest: list[ColumnElement[Any]] = [runs.c.created_at.desc(), runs.c.id.desc()]
    if which.order == "created":
        return [runs.c.created_at.asc(), runs.c.id.asc()] if which.is_reversed else newest
    columns: dict[RunOrder, ColumnElement[Any]] = {
        "last_request": runs.c.last_request_at,
        "steps": runs.c.steps,
        "loss": runs.c.loss,
        "name": func.lower(runs.c.name),
    }
    column, is_descending = columns[which.order], which.order in ("last_request", "steps")
    return [column.is_(None), column.desc() if is_descending != which.is_reversed else column.asc(), *newest]


def _begins(column: ColumnElement[str], text: str) -> ColumnElement[bool]:
    """Whether a column begins with a text. Not LIKE: in SQLite it takes a for A, and uses no index either."""
    return func.substr(column, 1, len(text)) == text


def _dependents(connection: Connection, run_id: str) -> DeletedRun:
    query = (
        select(checkpoints).where(checkpoints.c.run_id == run_id).order_by(checkpoints.c.created_at, checkpoints.c.path)
    )
    saved = [as_record(CheckpointRecord, row) for row in connection.execute(query)]
    in_run = or_(_begins(samplers.c.model_path, f"tinker://{run_id}/"), _begins(samplers.c.folder, _folder(run_id)))
    found = [as_record(SamplerRecord, row) for row in connection.execute(_samplers_of(run_id).where(in_run))]
    count = connection.scalar(select(func.count()).select_from(operations).where(operations.c.run_id == run_id))
    snapshot = connection.scalar(select(runs.c.snapshot).where(runs.c.id == run_id))
    folders = {*(row.folder for row in saved), *(row.folder for row in found), snapshot}
    return DeletedRun(saved, found, int(count or 0), sorted(folder for folder in folders if folder))


def _samplers_of(run_id: str) -> Select[Any]:
    """Return the query of the samplers that may be of a run: those of its tenant, for which there is an index."""
    owner = select(runs.c.tenant).where(runs.c.id == run_id).scalar_subquery()
    return select(samplers).where(samplers.c.tenant == owner).order_by(samplers.c.created_at)


def _folder(run_id: str) -> str:
    return f"checkpoints/{run_id}/"
