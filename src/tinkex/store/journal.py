"""Runs and their operations: the journal from which a run can be rebuilt."""

from __future__ import annotations

from typing import Literal

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from tinkex.errors import ValidationError
from tinkex.store.checkpoints import put_checkpoint
from tinkex.store.database import Database, as_record, as_records, bounded, values_of
from tinkex.store.errors import Duplicate, translated
from tinkex.store.payloads import StoredPayload
from tinkex.store.records import CheckpointRecord, OperationRecord, RunRecord, SamplerRecord
from tinkex.store.rows import operations, payloads, remembered_responses, runs, samplers

PayloadPart = Literal["command", "result"]
_BATCH = 500
"""How many ids one statement names; databases bound the number of parameters."""

# Built once: these run for every operation, and building costs as much as running.
_ADD_PAYLOAD = insert(payloads)
_GET_OPERATION = select(operations).where(operations.c.request_id == bindparam("id"))
_GET_PAYLOAD = select(payloads.c.content, payloads.c.file).where(
    payloads.c.request_id == bindparam("id"), payloads.c.part == bindparam("wanted")
)
_MARK_REQUEST = update(runs).where(runs.c.id == bindparam("run")).values(last_request_at=bindparam("at"))
_FINISH = (
    update(operations)
    .where(operations.c.request_id == bindparam("id"), operations.c.state == "queued")
    .values(
        state=bindparam("to"),
        finished_at=bindparam("at"),
        result_type=bindparam("as_type"),
        error=bindparam("why"),
        category=bindparam("whose"),
        engine_s=bindparam("seconds"),
        metrics=bindparam("numbers", type_=operations.c.metrics.type),
    )
)
# Written out and not passed as parameters: only so does SQLite see that the partial index serves.
_FAILED = operations.c.state.in_(bindparam("ended", ("failed", "refused"), expanding=True, literal_execute=True))


class Journal(Database):
    def add_run(self, run: RunRecord, creation: OperationRecord, command: bytes) -> None:
        """A run and the operation that creates it; both or neither."""
        with self._writing(command) as (connection, kept):
            if not connection.execute(self._insert_new(runs), values_of(run)).rowcount:
                raise Duplicate(_existing_operation(connection, creation))
            replaced = self._place(connection, creation, kept)
        self._payloads.remove(replaced)

    def get_run(self, run_id: str) -> RunRecord | None:
        with self._read() as connection:
            row = connection.execute(select(runs).where(runs.c.id == run_id)).first()
        return None if row is None else as_record(RunRecord, row)

    def list_runs(self, tenant: str, offset: int, limit: int) -> tuple[list[RunRecord], int]:
        """A page, newest first, and how many there are."""
        wanted = select(runs).where(runs.c.tenant == tenant).order_by(runs.c.created_at.desc(), runs.c.id.desc())
        with self._read() as connection:
            rows = connection.execute(wanted.offset(bounded(offset)).limit(bounded(limit))).all()
            total = connection.scalar(select(func.count()).select_from(runs).where(runs.c.tenant == tenant))
        return as_records(RunRecord, rows), int(total or 0)

    def runs_of_session(self, session_id: str) -> list[str]:
        """Their ids, oldest first."""
        with self._read() as connection:
            wanted = select(runs.c.id).where(runs.c.session_id == session_id).order_by(runs.c.created_at, runs.c.id)
            return list(connection.scalars(wanted))

    def set_unloaded(self, run_id: str) -> None:
        with self._write() as connection:
            connection.execute(update(runs).where(runs.c.id == run_id).values(is_unloaded=True))

    def set_snapshot(self, run_id: str, folder: str, seq_id: int) -> str | None:
        """The run can now be rebuilt from `folder`, which holds the operations up to `seq_id`: their commands go.

        The folder that stood there before is returned; nothing refers to it any more.
        """
        with self._write() as connection:
            former = connection.scalar(select(runs.c.snapshot).where(runs.c.id == run_id).with_for_update())
            connection.execute(update(runs).where(runs.c.id == run_id).values(snapshot=folder, snapshot_seq=seq_id))
            inside = select(operations.c.request_id).where(
                operations.c.run_id == run_id, operations.c.seq_id <= seq_id, operations.c.state != "queued"
            )
            gone = connection.scalars(
                delete(payloads)
                .where(payloads.c.part == "command", payloads.c.request_id.in_(inside))
                .returning(payloads.c.file)
            ).all()
        self._payloads.remove(gone)
        return former if former != folder else None

    def add_operation(self, operation: OperationRecord, command: bytes | None) -> None:
        """Add a line to the journal. `Duplicate` if the run has this number; one that was refused is replaced."""
        with self._writing(command) as (connection, kept):
            replaced = self._place(connection, operation, kept)
            connection.execute(_MARK_REQUEST, {"run": operation.run_id, "at": operation.created_at})
        self._payloads.remove(replaced)

    def get_operation(self, request_id: str) -> OperationRecord | None:
        with self._read() as connection:
            row = connection.execute(_GET_OPERATION, {"id": request_id}).first()
        return None if row is None else as_record(OperationRecord, row)

    def operations_of(self, run_id: str, after_seq: int = -1) -> list[OperationRecord]:
        """A run's operations by number, those after `after_seq`."""
        with self._read() as connection:
            rows = connection.execute(
                select(operations)
                .where(operations.c.run_id == run_id, operations.c.seq_id > after_seq)
                .order_by(operations.c.seq_id)
            ).all()
        return as_records(OperationRecord, rows)

    def done_since(self, run_id: str, after_seq: int, limit: int) -> list[OperationRecord]:
        """A run's finished operations by number, from after `after_seq` on up to the first that is not finished."""
        unfinished = select(func.min(operations.c.seq_id)).where(
            operations.c.run_id == run_id, operations.c.seq_id > after_seq, operations.c.state == "queued"
        )
        with self._read() as connection:
            end = connection.scalar(unfinished)
            wanted = select(operations).where(operations.c.run_id == run_id, operations.c.seq_id > after_seq)
            if end is not None:
                wanted = wanted.where(operations.c.seq_id < end)
            wanted = wanted.where(operations.c.state == "done").order_by(operations.c.seq_id)
            return as_records(OperationRecord, connection.execute(wanted.limit(bounded(limit))).all())

    def failures(self, tenant: str, offset: int, limit: int) -> tuple[list[OperationRecord], int]:
        """A page of a tenant's operations that failed or were refused, the latest first, and how many there are."""
        theirs = (operations.c.tenant == tenant, _FAILED)
        wanted = select(operations).where(*theirs).order_by(operations.c.finished_at.desc(), operations.c.seq_id.desc())
        with self._read() as connection:
            rows = connection.execute(wanted.offset(bounded(offset)).limit(bounded(limit))).all()
            total = connection.scalar(select(func.count()).select_from(operations).where(*theirs))
        return as_records(OperationRecord, rows), int(total or 0)

    def queued(self) -> list[OperationRecord]:
        """Every operation that waits, by run and number."""
        with self._read() as connection:
            rows = connection.execute(
                select(operations)
                .where(operations.c.state == "queued")
                .order_by(operations.c.run_id, operations.c.seq_id)
            ).all()
        return as_records(OperationRecord, rows)

    def last_seq(self, run_id: str) -> int:
        """The highest number accepted, in any state; -1 if there is none."""
        with self._read() as connection:
            last = connection.scalar(select(func.max(operations.c.seq_id)).where(operations.c.run_id == run_id))
        return -1 if last is None else int(last)

    def command(self, request_id: str) -> bytes:
        """KeyError if it is not there: never kept, or inside a snapshot by now."""
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
        """The operation is done, with what came of it; all or nothing. Returns a replaced checkpoint to be removed."""
        with self._writing(result) as (connection, kept):
            assert kept is not None
            self._end(connection, request_id, to="done", at=at, as_type=result_type, seconds=engine_s, numbers=metrics)
            _insert_payload(connection, request_id, "result", at, kept)
            if sampler is not None and not connection.execute(self._insert_new(samplers), values_of(sampler)).rowcount:
                raise ValidationError(
                    f"The sampler {sampler.id} is already there. Use another sampling_session_seq_id."
                )
            return None if checkpoint is None else put_checkpoint(connection, checkpoint)

    def fail(self, request_id: str, *, at: float, error: str, category: str) -> None:
        with self._write() as connection:
            self._end(connection, request_id, to="failed", at=at, why=error, whose=category)

    def expire_results(self, before: float) -> int:
        """Drop the results that are older, and the remembered answers; how many results. The operations' rows stay."""
        with self._write() as connection:
            gone = connection.execute(
                delete(payloads)
                .where(payloads.c.part == "result", payloads.c.at < before)
                .returning(payloads.c.request_id, payloads.c.file)
            ).all()
            for start in range(0, len(gone), _BATCH):
                ids = [row.request_id for row in gone[start : start + _BATCH]]
                connection.execute(update(operations).where(operations.c.request_id.in_(ids)).values(result_type=None))
            connection.execute(delete(remembered_responses).where(remembered_responses.c.at < before))
        self._payloads.remove(row.file for row in gone)
        return len(gone)

    def _payload(self, request_id: str, part: PayloadPart) -> bytes | None:
        with translated():
            with self._read() as connection:
                row = connection.execute(_GET_PAYLOAD, {"id": request_id, "wanted": part}).first()
            return None if row is None else self._payloads.read(StoredPayload(row.content, row.file))

    def _place(
        self, connection: Connection, operation: OperationRecord, kept: StoredPayload | None
    ) -> list[str | None]:
        """Put an operation into its place. Returned are the files of a refused one that had it before."""
        replaced: list[str | None] = []
        while not connection.execute(self._insert_new(operations), values_of(operation)).rowcount:
            standing = _existing_operation(connection, operation)
            if standing.state != "refused" or standing.run_id != operation.run_id:
                raise Duplicate(standing)
            replaced += _drop_operation(connection, standing.request_id)
        if kept is not None:
            _insert_payload(connection, operation.request_id, "command", operation.created_at, kept)
        return replaced

    def _end(
        self,
        connection: Connection,
        request_id: str,
        *,
        to: str,
        at: float,
        as_type: str | None = None,
        why: str | None = None,
        whose: str | None = None,
        seconds: float | None = None,
        numbers: dict[str, float] | None = None,
    ) -> None:
        values = {"id": request_id, "to": to, "at": at, "as_type": as_type, "why": why, "whose": whose}
        if not connection.execute(_FINISH, {**values, "seconds": seconds, "numbers": numbers}).rowcount:
            raise KeyError(f"{request_id} is not queued")


def _existing_operation(connection: Connection, operation: OperationRecord) -> OperationRecord:
    """The operation that has the number, or else the request id, of this one."""
    by_number = select(operations).where(
        operations.c.run_id == operation.run_id, operations.c.seq_id == operation.seq_id
    )
    row = connection.execute(by_number.with_for_update()).first()
    if row is None:
        row = connection.execute(_GET_OPERATION, {"id": operation.request_id}).one()
    return as_record(OperationRecord, row)


def _drop_operation(connection: Connection, request_id: str) -> list[str | None]:
    connection.execute(delete(operations).where(operations.c.request_id == request_id))
    dropped = delete(payloads).where(payloads.c.request_id == request_id).returning(payloads.c.file)
    return list(connection.scalars(dropped))


def _insert_payload(connection: Connection, request_id: str, part: PayloadPart, at: float, kept: StoredPayload) -> None:
    connection.execute(
        _ADD_PAYLOAD,
        {"request_id": request_id, "part": part, "at": at, "content": kept.content, "file": kept.file},
    )
