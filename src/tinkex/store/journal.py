"""The journal: runs and their operations, from which a run can be rebuilt."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from tinkex.errors import ValidationError
from tinkex.store.checkpoints import put_checkpoint
from tinkex.store.database import MAX_INTEGER, Database, as_record, bounded, values_of
from tinkex.store.errors import Duplicate, translated
from tinkex.store.payloads import StoredPayload
from tinkex.store.records import CheckpointRecord, OperationRecord, RunRecord, SamplerRecord
from tinkex.store.tables import operations, payloads, remembered_responses, runs, samplers, sessions

PayloadPart = Literal["command", "result"]

# Built once: these run for every operation, and building a statement costs as much as running it.
_ADD_PAYLOAD = insert(payloads)
_GET_OPERATION = select(operations).where(operations.c.request_id == bindparam("id"))
_GET_PAYLOAD = select(payloads.c.content, payloads.c.file).where(
    payloads.c.request_id == bindparam("id"), payloads.c.part == bindparam("part_name")
)
_MARK_REQUEST = update(runs).where(runs.c.id == bindparam("run")).values(last_request_at=bindparam("at"))
_ENDING = ("state", "finished_at", "result_type", "error", "category", "engine_s", "metrics")
"""The columns that the end of an operation sets."""
_FINISH = (
    update(operations)
    .where(operations.c.request_id == bindparam("id"), operations.c.state == "queued")
    # SQLAlchemy reserves the names of the columns themselves.
    .values({name: bindparam(f"new_{name}", type_=operations.c[name].type) for name in _ENDING})
)
# Literal values and not parameters: otherwise SQLite does not use the partial index.
_HAS_FAILED = operations.c.state.in_(
    bindparam("failed_states", ("failed", "refused"), expanding=True, literal_execute=True)
)


class Journal(Database):
    def add_run(self, run: RunRecord, creation: OperationRecord, command: bytes) -> None:
        with self._write_with_payload(command) as (connection, payload):
            if not connection.execute(self._insert_new(runs), values_of(run)).rowcount:
                raise Duplicate(_existing_operation(connection, creation))
            replaced_files = self._insert_operation(connection, creation, payload)
        self._payloads.remove(replaced_files)

    def get_run(self, run_id: str) -> RunRecord | None:
        return self._first(RunRecord, select(runs).where(runs.c.id == run_id))

    def list_runs(
        self, tenant: str, offset: int, limit: int, project_id: str | None = None
    ) -> tuple[list[RunRecord], int]:
        """Return a page of a tenant's runs, newest first, and how many there are in all.

        With `project_id`, only those whose session was assigned to that project.
        """
        query = select(runs).where(runs.c.tenant == tenant).order_by(runs.c.created_at.desc(), runs.c.id.desc())
        if project_id is not None:
            of_project = select(sessions.c.id).where(sessions.c.project_id == project_id)
            query = query.where(runs.c.session_id.in_(of_project))
        return self._page(RunRecord, query, offset, limit)

    def runs_of_session(self, session_id: str) -> list[str]:
        """Return the ids of a session's runs, oldest first."""
        with self._read() as connection:
            query = select(runs.c.id).where(runs.c.session_id == session_id).order_by(runs.c.created_at, runs.c.id)
            return list(connection.scalars(query))

    def set_unloaded(self, run_id: str) -> None:
        self._run_write(update(runs).where(runs.c.id == run_id).values(is_unloaded=True))

    def set_snapshot(self, run_id: str, folder: str, seq_id: int) -> str | None:
        """Record that `folder` is a snapshot of the run after operation `seq_id`, and delete the commands up to it.

        Returns the folder of the former snapshot, which nothing refers to any more.
        """
        with self._write() as connection:
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

    def add_operation(self, operation: OperationRecord, command: bytes | None) -> None:
        """Add an operation to the journal. Raises Duplicate if the run has this sequence number.

        A rejected operation with this number is replaced.
        """
        with self._write_with_payload(command) as (connection, payload):
            replaced_files = self._insert_operation(connection, operation, payload)
            connection.execute(_MARK_REQUEST, {"run": operation.run_id, "at": operation.created_at})
        self._payloads.remove(replaced_files)

    def get_operation(self, request_id: str) -> OperationRecord | None:
        return self._first(OperationRecord, _GET_OPERATION, {"id": request_id})

    def operations_of(self, run_id: str, after_seq: int = -1) -> list[OperationRecord]:
        """Return a run's operations after `after_seq`, by sequence number."""
        query = select(operations).where(operations.c.run_id == run_id, operations.c.seq_id > after_seq)
        return self._all(OperationRecord, query.order_by(operations.c.seq_id))

    def done_since(self, run_id: str, after_seq: int, limit: int) -> list[OperationRecord]:
        """Return a run's successful operations after `after_seq`, up to the first that still waits, by number."""
        later = (operations.c.run_id == run_id, operations.c.seq_id > after_seq)
        first_queued = select(func.min(operations.c.seq_id)).where(*later, operations.c.state == "queued")
        is_before = operations.c.seq_id < func.coalesce(first_queued.scalar_subquery(), MAX_INTEGER)
        query = select(operations).where(*later, is_before, operations.c.state == "done")
        return self._all(OperationRecord, query.order_by(operations.c.seq_id).limit(bounded(limit)))

    def failures(self, tenant: str, offset: int, limit: int) -> tuple[list[OperationRecord], int]:
        """Return a page of a tenant's operations that failed or were rejected, latest first, and how many there are."""
        newest_first = (operations.c.finished_at.desc(), operations.c.seq_id.desc())
        query = select(operations).where(operations.c.tenant == tenant, _HAS_FAILED).order_by(*newest_first)
        return self._page(OperationRecord, query, offset, limit)

    def queued(self) -> list[OperationRecord]:
        """Return every operation that waits, by run and sequence number."""
        query = select(operations).where(operations.c.state == "queued")
        return self._all(OperationRecord, query.order_by(operations.c.run_id, operations.c.seq_id))

    def last_seq(self, run_id: str) -> int:
        """Return the highest sequence number in any state, or -1 if the run has none."""
        with self._read() as connection:
            last = connection.scalar(select(func.max(operations.c.seq_id)).where(operations.c.run_id == run_id))
        return -1 if last is None else int(last)

    def command(self, request_id: str) -> bytes:
        """Return an operation's command. Raises KeyError if it was never stored or is part of a snapshot by now."""
        content = self._payload(request_id, "command")
        if content is None:
            raise KeyError(request_id)
        return content

    def result(self, request_id: str) -> bytes | None:
        return self._payload(request_id, "result")

    def finish(
        self,
        request_id: str,
        *,
        at: float,
        result: bytes,
        result_type: Literal["json", "proto"],
        checkpoint: CheckpointRecord | None = None,
        sampler: SamplerRecord | None = None,
        engine_s: float | None = None,
        metrics: dict[str, float] | None = None,
    ) -> CheckpointRecord | None:
        """Mark an operation as done and store what it produced, in one transaction.

        Returns a replaced checkpoint whose files can be deleted.
        """
        with self._write_with_payload(result) as (connection, payload):
            assert payload is not None
            _end_operation(
                connection,
                request_id,
                state="done",
                finished_at=at,
                result_type=result_type,
                engine_s=engine_s,
                metrics=metrics,
            )
            _insert_payload(connection, request_id, "result", at, payload)
            if sampler is not None and not connection.execute(self._insert_new(samplers), values_of(sampler)).rowcount:
                raise ValidationError(f"The sampler {sampler.id} exists already. Use another sampling_session_seq_id.")
            return None if checkpoint is None else put_checkpoint(connection, checkpoint)

    def fail(self, request_id: str, *, at: float, error: str, category: str) -> None:
        with self._write() as connection:
            _end_operation(connection, request_id, state="failed", finished_at=at, error=error, category=category)

    def expire_results(self, before: float) -> int:
        """Delete results and remembered responses from before that time, and return how many results.

        The rows of the operations stay.
        """
        is_expired = (payloads.c.part == "result", payloads.c.at < before)
        ids = select(payloads.c.request_id).where(*is_expired)
        with self._write() as connection:
            connection.execute(update(operations).where(operations.c.request_id.in_(ids)).values(result_type=None))
            files = connection.scalars(delete(payloads).where(*is_expired).returning(payloads.c.file)).all()
            connection.execute(delete(remembered_responses).where(remembered_responses.c.at < before))
        self._payloads.remove(files)
        return len(files)

    def _payload(self, request_id: str, part: PayloadPart) -> bytes | None:
        with translated():
            with self._read() as connection:
                row = connection.execute(_GET_PAYLOAD, {"id": request_id, "part_name": part}).first()
            return None if row is None else self._payloads.read(StoredPayload(row.content, row.file))

    def _insert_operation(
        self, connection: Connection, operation: OperationRecord, payload: StoredPayload | None
    ) -> list[str | None]:
        """Insert an operation, and return the files of a rejected one that had its sequence number."""
        replaced_files: list[str | None] = []
        while not connection.execute(self._insert_new(operations), values_of(operation)).rowcount:
            existing = _existing_operation(connection, operation)
            if existing.state != "refused" or existing.run_id != operation.run_id:
                raise Duplicate(existing)
            replaced_files += _delete_operation(connection, existing.request_id)
        if payload is not None:
            _insert_payload(connection, operation.request_id, "command", operation.created_at, payload)
        return replaced_files


def _end_operation(connection: Connection, request_id: str, **ending: Any) -> None:
    """Write how an operation ended: the columns of `_ENDING`, NULL if absent. Raises KeyError if it does not wait."""
    values = {f"new_{name}": ending.get(name) for name in _ENDING}
    if not connection.execute(_FINISH, {"id": request_id, **values}).rowcount:
        raise KeyError(f"{request_id} is not queued")


def _existing_operation(connection: Connection, operation: OperationRecord) -> OperationRecord:
    """Return the stored operation that has the sequence number, or else the request id, of this one."""
    by_number = select(operations).where(
        operations.c.run_id == operation.run_id, operations.c.seq_id == operation.seq_id
    )
    row = connection.execute(by_number.with_for_update()).first()
    if row is None:
        row = connection.execute(_GET_OPERATION, {"id": operation.request_id}).one()
    return as_record(OperationRecord, row)


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
