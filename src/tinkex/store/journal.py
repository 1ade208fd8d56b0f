"""The journal: runs and their operations, from which a run can be rebuilt. Lists of runs are in `run_records`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, update

from tinkex.errors import ValidationError
from tinkex.store.checkpoints import put_checkpoint
from tinkex.store.database import MAX_INTEGER, Database, as_record, bounded, values_of
from tinkex.store.errors import Duplicate, HomeLost, RunDeleted, translated
from tinkex.store.payloads import StoredPayload
from tinkex.store.records import CheckpointRecord, Home, OperationRecord, RunRecord, SamplerRecord
from tinkex.store.tables import homes, operations, payloads, remembered_responses, runs, samplers

PayloadPart = Literal["command", "result"]

# Built once: these run for every operation, and building a statement costs as much as running it.
_ADD_PAYLOAD = insert(payloads)
_GET_OPERATION = select(operations).where(operations.c.request_id == bindparam("id"))
_GET_PAYLOAD = select(payloads.c.content, payloads.c.file).where(
    payloads.c.request_id == bindparam("id"), payloads.c.part == bindparam("part_name")
)
_MARK_REQUEST = update(runs).where(runs.c.id == bindparam("run")).values(last_request_at=bindparam("at"))
_STEP_BEFORE = (
    select(operations.c.seq_id)
    .where(
        operations.c.run_id == bindparam("run"),
        operations.c.seq_id < bindparam("last"),
        operations.c.kind == "optim_step",
        operations.c.state != "queued",  # one that failed ended its step too
    )
    .order_by(operations.c.seq_id.desc())
    .limit(1)
)
_PARTS_OF_STEP = select(operations).where(
    operations.c.run_id == bindparam("run"),
    operations.c.seq_id <= bindparam("last"),
    operations.c.seq_id > func.coalesce(_STEP_BEFORE.scalar_subquery().correlate(None), -1),
    operations.c.state == "done",
)
_COUNT_STEP = (
    update(runs)
    .where(runs.c.id == bindparam("run"))
    .values(steps=runs.c.steps + 1, loss=func.coalesce(bindparam("new_loss", type_=runs.c.loss.type), runs.c.loss))
)
_ENDING = ("state", "finished_at", "result_type", "error", "category", "engine_s", "metrics")
"""The columns that the end of an operation sets."""
_FINISH = (
    update(operations)
    .where(operations.c.request_id == bindparam("id"), operations.c.state == "queued")
    # SQLAlchemy reserves the names of the columns themselves.
    .values({name: bindparam(f"new_{name}", type_=operations.c[name].type) for name in _ENDING})
)
# "For share": who claims the run waits until the write is committed or rolled back, and then the next write fails here.
_FENCE = (
    select(homes.c.epoch)
    .where(
        homes.c.run_id == bindparam("run"), homes.c.node == bindparam("own"), homes.c.epoch == bindparam("own_epoch")
    )
    .with_for_update(read=True)
)
# Literal values and not parameters: otherwise SQLite does not use the partial index.
_HAS_FAILED = operations.c.state.in_(
    bindparam("failed_states", ("failed", "refused"), expanding=True, literal_execute=True)
)
_WAITS = operations.c.state == bindparam("waiting_state", "queued", literal_execute=True)
MOST_RECENT = 1000
"""Operations of a run that are read when it is used again. A retry of an older one is found in the journal itself."""


class EndedStep(NamedTuple):
    """An optim_step that is done: its run counts it, with the loss that `loss_of` makes of the step's operations."""

    run_id: str
    seq_id: int
    loss_of: Callable[[Iterable[OperationRecord]], float | None]


class Journal(Database):
    """Whatever changes a run takes the `home` of the node that works on it, and is rolled back if another one does.

    A server that has the store to itself passes None.
    """

    needs_homes = False
    """Whether a write without a home is a mistake of ours: several servers share the store."""

    def _check_home(self, connection: Connection, run_id: str, home: Home | None) -> None:
        """Raise HomeLost unless the run is at home on the node that writes, in the epoch of its work (the fence)."""
        if home is None:
            assert not self.needs_homes, f"a write about {run_id} without its home"
            return
        assert home.run_id == run_id
        if connection.scalar(_FENCE, {"run": run_id, "own": home.node, "own_epoch": home.epoch}) is None:
            raise HomeLost(run_id)

    def add_run(self, run: RunRecord, creation: OperationRecord, command: bytes, home: Home | None = None) -> None:
        with self._write_with_payload(command) as (connection, payload):
            self._check_home(connection, run.id, home)
            if not connection.execute(self._insert_new(runs), values_of(run)).rowcount:
                raise Duplicate(existing_operation(connection, creation))
            replaced_files = self._insert_operation(connection, creation, payload)
        self._payloads.remove(replaced_files)

    def get_run(self, run_id: str) -> RunRecord | None:
        return self._first(RunRecord, select(runs).where(runs.c.id == run_id))

    def count_open_runs(self, tenant: str, since: float) -> int:
        """Return how many runs of a tenant were used since then and are not unloaded."""
        is_open = (runs.c.tenant == tenant, runs.c.is_unloaded.is_(False), runs.c.last_request_at >= since)
        with self._read() as connection:
            return int(connection.scalar(select(func.count()).select_from(runs).where(*is_open)) or 0)

    def runs_of_session(self, session_id: str) -> list[str]:
        """Return the ids of a session's runs, oldest first."""
        with self._read() as connection:
            query = select(runs.c.id).where(runs.c.session_id == session_id).order_by(runs.c.created_at, runs.c.id)
            return list(connection.scalars(query))

    def set_unloaded(self, run_id: str, home: Home | None = None) -> None:
        with self._write() as connection:
            self._check_home(connection, run_id, home)
            connection.execute(update(runs).where(runs.c.id == run_id).values(is_unloaded=True))

    def set_snapshot(self, run_id: str, folder: str, seq_id: int, home: Home | None = None) -> str | None:
        """Record that `folder` is a snapshot of the run after operation `seq_id`, and delete the commands up to it.

        Returns the folder of the former snapshot, which nothing refers to any more.
        """
        with self._write() as connection:
            self._check_home(connection, run_id, home)
            former = connection.scalar(select(runs.c.snapshot).where(runs.c.id == run_id).with_for_update())
            connection.execute(update(runs).where(runs.c.id == run_id).values(snapshot=folder, snapshot_seq=seq_id))
            in_snapshot = select(operations.c.request_id).where(
                operations.c.run_id == run_id, operations.c.seq_id <= seq_id, operations.c.state != "queued"
            )
            deleted_files = connection.scalars(
                delete(payloads)
                .where(payloads.c.part == "command", payloads.c.request_id.in_(in_snapshot))
                .returning(payloads.c.file)
            ).all()
        self._payloads.remove(deleted_files)
        return former if former != folder else None

    def add_operation(
        self, operation: OperationRecord, command: bytes | StoredPayload | None, home: Home | None = None
    ) -> None:
        """Add an operation to the journal. Raises Duplicate if the run has this sequence number.

        A rejected operation with this number is replaced. A command that was put beforehand is deleted after an error.
        """
        with self._write_with_payload(command) as (connection, payload):
            self._check_home(connection, operation.run_id, home)
            _mark_request(connection, operation)
            replaced_files = self._insert_operation(connection, operation, payload)
        self._payloads.remove(replaced_files)

    def add_rejected(self, operation: OperationRecord, forgotten: Sequence[str], home: Home | None = None) -> None:
        """Add an operation that was rejected, and delete older ones of these request ids."""
        with self._write() as connection:
            self._check_home(connection, operation.run_id, home)
            _mark_request(connection, operation)
            replaced_files = self._insert_operation(connection, operation, None)
            if forgotten:
                is_forgotten = (operations.c.request_id.in_(forgotten), operations.c.state == "refused")
                connection.execute(delete(operations).where(*is_forgotten))
        self._payloads.remove(replaced_files)

    def get_operation(self, request_id: str) -> OperationRecord | None:
        return self._first(OperationRecord, _GET_OPERATION, {"id": request_id})

    def operations_of(self, run_id: str, after_seq: int = -1) -> list[OperationRecord]:
        """Return a run's operations after `after_seq`, by sequence number."""
        query = select(operations).where(operations.c.run_id == run_id, operations.c.seq_id > after_seq)
        return self._all(OperationRecord, query.order_by(operations.c.seq_id))

    def recent_operations(self, run_id: str, most: int = MOST_RECENT) -> list[OperationRecord]:
        """Return what a run's queue has to know, by sequence number, however many operations the run had.

        These are the first operation, all that wait, the last that ended with all after it, and the `most` last ones.
        """
        of_run = operations.c.run_id == run_id
        numbers = select(operations.c.seq_id).where(of_run).order_by(operations.c.seq_id.desc()).limit(1)
        with self._read() as connection:
            oldest = connection.scalar(numbers.offset(bounded(most - 1)))
            last_ended = connection.scalar(numbers.where(operations.c.state.in_(("done", "failed"))))
            since = -1 if oldest is None or last_ended is None else min(oldest, last_ended)
            is_recent = or_(operations.c.seq_id >= since, operations.c.seq_id == 0)
            # Two queries: with one, SQLite reads all rows of the run.
            rows = [*connection.execute(select(operations).where(of_run, is_recent))]
            rows += connection.execute(select(operations).where(of_run, _WAITS, operations.c.seq_id < since))
        records = {row.seq_id: as_record(OperationRecord, row) for row in rows}
        return [records[seq_id] for seq_id in sorted(records)]

    def ended_since(self, run_id: str, since_seq: int, limit: int) -> list[OperationRecord]:
        """Return a run's operations from `since_seq` on that ended, up to the first that still waits, by number."""
        later = (operations.c.run_id == run_id, operations.c.seq_id >= since_seq)
        first_queued = select(func.min(operations.c.seq_id)).where(*later, operations.c.state == "queued")
        is_before = operations.c.seq_id < func.coalesce(first_queued.scalar_subquery(), MAX_INTEGER)
        query = select(operations).where(*later, is_before, operations.c.state != "queued")
        return self._all(OperationRecord, query.order_by(operations.c.seq_id).limit(bounded(limit)))

    def failures(
        self, tenant: str, offset: int, limit: int, run_id: str | None = None
    ) -> tuple[list[OperationRecord], int]:
        """Return a page of a tenant's operations that failed or were rejected, latest first, and how many there are."""
        newest_first = (operations.c.finished_at.desc(), operations.c.seq_id.desc())
        query = select(operations).where(operations.c.tenant == tenant, _HAS_FAILED)
        if run_id is not None:
            query = query.where(operations.c.run_id == run_id)
        return self._page(OperationRecord, query.order_by(*newest_first), offset, limit)

    def queued(self) -> list[OperationRecord]:
        """Return every operation that waits, by run and sequence number."""
        query = select(operations).where(operations.c.state == "queued")
        return self._all(OperationRecord, query.order_by(operations.c.run_id, operations.c.seq_id))

    def queued_ids(self) -> dict[str, list[str]]:
        """Return the ids of the operations that wait, by run. Reads nothing else: a row may be damaged."""
        query = select(operations.c.run_id, operations.c.request_id).where(operations.c.state == "queued")
        ids: dict[str, list[str]] = {}
        with self._read() as connection:
            for run_id, request_id in connection.execute(query.order_by(operations.c.run_id, operations.c.seq_id)):
                ids.setdefault(run_id, []).append(request_id)
        return ids

    def last_seq(self, run_id: str) -> int:
        """Return the highest sequence number in any state, or -1 if the run has none."""
        with self._read() as connection:
            last = connection.scalar(select(func.max(operations.c.seq_id)).where(operations.c.run_id == run_id))
        return -1 if last is None else int(last)

    def command(self, request_id: str) -> bytes:
        """Return an operation's command. Raises KeyError if it was never stored or is part of a snapshot by now."""
        content = self.payload(request_id, "command")
        if content is None:
            raise KeyError(request_id)
        return content

    def result(self, request_id: str) -> bytes | None:
        return self.payload(request_id, "result")

    def result_size(self, request_id: str) -> int:
        """Return the bytes of an operation's result, without reading it if it is large; 0 if there is none."""
        with translated(), self._read() as connection:
            row = connection.execute(_GET_PAYLOAD, {"id": request_id, "part_name": "result"}).first()
            if row is None:
                return 0
            return len(row.content) if row.file is None else self._payloads.size(row.file)

    def finish(
        self,
        request_id: str,
        *,
        at: float,
        result: bytes | StoredPayload,
        result_type: Literal["json", "proto"],
        checkpoint: CheckpointRecord | None = None,
        sampler: SamplerRecord | None = None,
        engine_s: float | None = None,
        metrics: dict[str, float] | None = None,
        step: EndedStep | None = None,
        home: Home | None = None,
    ) -> CheckpointRecord | None:
        """Mark an operation as done and store what it produced, in one transaction.

        Returns a replaced checkpoint whose files can be deleted.
        """
        with self._write_with_payload(result) as (connection, payload):
            assert payload is not None
            self._end_operation(
                connection,
                request_id,
                home,
                state="done",
                finished_at=at,
                result_type=result_type,
                engine_s=engine_s,
                metrics=metrics,
            )
            _insert_payload(connection, request_id, "result", at, payload)
            if step is not None:
                _count_step(connection, step)
            if sampler is not None and not connection.execute(self._insert_new(samplers), values_of(sampler)).rowcount:
                raise ValidationError(f"The sampler {sampler.id} exists already. Use another sampling_session_seq_id.")
            return None if checkpoint is None else put_checkpoint(connection, checkpoint)

    def fail(self, request_id: str, *, at: float, error: str, category: str, home: Home | None = None) -> None:
        with self._write() as connection:
            ending = {"finished_at": at, "error": error, "category": category}
            self._end_operation(connection, request_id, home, state="failed", **ending)

    def _end_operation(self, connection: Connection, request_id: str, home: Home | None, **ending: Any) -> None:
        """Write how an operation ended: the columns of `_ENDING`, NULL if absent. KeyError: it does not wait."""
        self._check_home(connection, home.run_id if home else request_id, home)
        values = {f"new_{name}": ending.get(name) for name in _ENDING}
        if not connection.execute(_FINISH, {"id": request_id, **values}).rowcount:
            raise KeyError(f"{request_id} is not queued")

    def expire_results(self, before: float) -> int:
        """Delete results and remembered responses from before that time, and return how many results.

        The rows of the operations stay, except those of rejected ones. Works on a full disk too.
        """
        return self._use_reserve(lambda: self._expire_results(before))

    def _expire_results(self, before: float) -> int:
        is_expired = (payloads.c.part == "result", payloads.c.at < before)
        ids = select(payloads.c.request_id).where(*is_expired)
        with self._write() as connection:
            connection.execute(update(operations).where(operations.c.request_id.in_(ids)).values(result_type=None))
            files = connection.scalars(delete(payloads).where(*is_expired).returning(payloads.c.file)).all()
            connection.execute(delete(remembered_responses).where(remembered_responses.c.at < before))
            # With `_HAS_FAILED`, because there is an index for it.
            is_old = (_HAS_FAILED, operations.c.state == "refused", operations.c.finished_at < before)
            connection.execute(delete(operations).where(*is_old))
        self._payloads.remove(files)
        return len(files)

    def result_files(self) -> list[tuple[str, str, int, float]]:
        """Return tenant, request id, bytes and time of every result in a file of its own, oldest first."""
        query = select(operations.c.tenant, payloads.c.request_id, payloads.c.file, payloads.c.at)
        query = query.join(operations, operations.c.request_id == payloads.c.request_id)
        query = query.where(payloads.c.part == "result", payloads.c.file.is_not(None)).order_by(payloads.c.at)
        with self._read() as connection:
            rows = connection.execute(query).all()
        return [(row.tenant, row.request_id, self._payloads.size(row.file), row.at) for row in rows]

    def drop_results(self, request_ids: Sequence[str]) -> None:
        """Delete the results of operations, as if they had expired. Works on a full disk too."""
        self._use_reserve(lambda: self._drop_results(request_ids))

    def _drop_results(self, request_ids: Sequence[str]) -> None:
        is_one = (payloads.c.part == "result", payloads.c.request_id.in_(request_ids))
        with self._write() as connection:
            ended = update(operations).where(operations.c.request_id.in_(request_ids))
            connection.execute(ended.values(result_type=None))
            files = connection.scalars(delete(payloads).where(*is_one).returning(payloads.c.file)).all()
        self._payloads.remove(files)

    def payload(self, request_id: str, part: PayloadPart) -> bytes | None:
        with translated():
            stored = self.find_payload(request_id, part)
            return None if stored is None else self._payloads.read(stored)

    def find_payload(self, request_id: str, part: PayloadPart) -> StoredPayload | None:
        """Return where an operation's command or result is stored; None if there is none."""
        with self._read() as connection:
            row = connection.execute(_GET_PAYLOAD, {"id": request_id, "part_name": part}).first()
        return None if row is None else StoredPayload(row.content, row.file)

    def _insert_operation(
        self, connection: Connection, operation: OperationRecord, payload: StoredPayload | None
    ) -> list[str | None]:
        """Insert an operation, and return the files of a rejected one that had its sequence number."""
        replaced_files: list[str | None] = []
        while not connection.execute(self._insert_new(operations), values_of(operation)).rowcount:
            existing = existing_operation(connection, operation)
            if existing.state != "refused" or existing.run_id != operation.run_id:
                raise Duplicate(existing)
            replaced_files += _delete_operation(connection, existing.request_id)
        if payload is not None:
            _insert_payload(connection, operation.request_id, "command", operation.created_at, payload)
        return replaced_files


def _mark_request(connection: Connection, operation: OperationRecord) -> None:
    """Note when a run was used last. Raises RunDeleted: of a request from before that, nothing may stay."""
    if not connection.execute(_MARK_REQUEST, {"run": operation.run_id, "at": operation.created_at}).rowcount:
        raise RunDeleted(operation.run_id)


def existing_operation(connection: Connection, operation: OperationRecord) -> OperationRecord:
    """Return the stored operation that has the sequence number, or else the request id, of this one."""
    by_number = select(operations).where(
        operations.c.run_id == operation.run_id, operations.c.seq_id == operation.seq_id
    )
    row = connection.execute(by_number.with_for_update()).first()
    if row is None:
        row = connection.execute(_GET_OPERATION, {"id": operation.request_id}).one()
    return as_record(OperationRecord, row)


def _count_step(connection: Connection, step: EndedStep) -> None:
    rows = connection.execute(_PARTS_OF_STEP, {"run": step.run_id, "last": step.seq_id})
    parts = sorted((as_record(OperationRecord, row) for row in rows), key=lambda row: row.seq_id)
    connection.execute(_COUNT_STEP, {"run": step.run_id, "new_loss": step.loss_of(parts)})


def _delete_operation(connection: Connection, request_id: str) -> list[str | None]:
    connection.execute(delete(operations).where(operations.c.request_id == request_id))
    statement = delete(payloads).where(payloads.c.request_id == request_id).returning(payloads.c.file)
    return list(connection.scalars(statement))


def _insert_payload(
    connection: Connection, request_id: str, part: PayloadPart, at: float, payload: StoredPayload
) -> None:
    connection.execute(
        _ADD_PAYLOAD,
        {"request_id": request_id, "part": part, "at": at, "content": payload.content, "file": payload.file},
    )
