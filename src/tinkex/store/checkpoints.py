"""Checkpoints: what was saved, whose it is, how long it stays."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, or_, select, update

from tinkex.store.database import Database, as_record, as_records, bounded, values_of
from tinkex.store.records import CheckpointRecord
from tinkex.store.rows import checkpoints, runs, samplers


class CheckpointStore(Database):
    def add_checkpoint(self, checkpoint: CheckpointRecord) -> CheckpointRecord | None:
        """Add it, in the place of one of the same path if there is one; that one is returned if its files may go."""
        with self._write() as connection:
            return put_checkpoint(connection, checkpoint)

    def get_checkpoint(self, path: str) -> CheckpointRecord | None:
        with self._read() as connection:
            row = connection.execute(select(checkpoints).where(checkpoints.c.path == path)).first()
        return None if row is None else as_record(CheckpointRecord, row)

    def list_checkpoints(
        self, tenant: str, run_id: str | None, offset: int, limit: int, now: float
    ) -> tuple[list[CheckpointRecord], int]:
        """A page of those that have not expired, newest first, and how many there are."""
        conditions: list[ColumnElement[bool]] = [
            checkpoints.c.tenant == tenant,
            or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > now),
        ]
        if run_id is not None:
            conditions.append(checkpoints.c.run_id == run_id)
        newest_first = (checkpoints.c.created_at.desc(), checkpoints.c.path.desc())
        wanted = select(checkpoints).where(*conditions).order_by(*newest_first)
        with self._read() as connection:
            rows = connection.execute(wanted.offset(bounded(offset)).limit(bounded(limit))).all()
            total = connection.scalar(select(func.count()).select_from(checkpoints).where(*conditions))
        return as_records(CheckpointRecord, rows), int(total or 0)

    def delete_checkpoint(self, path: str, *, expired_by: float | None = None) -> CheckpointRecord | None:
        """Forget it; what it was is returned, so that its folder can go.

        With `expired_by`, only if it has expired by then: one of its name may have been saved since it was looked up.
        """
        with self._write() as connection:
            return _take(connection, path, expired_by)

    def set_public(self, path: str, is_public: bool) -> None:
        self._set_checkpoint(path, is_public=is_public)

    def set_expiry(self, path: str, expires_at: float | None) -> None:
        self._set_checkpoint(path, expires_at=expires_at)

    def expired_checkpoints(self, now: float) -> list[CheckpointRecord]:
        with self._read() as connection:
            rows = connection.execute(
                select(checkpoints).where(checkpoints.c.expires_at <= now).order_by(checkpoints.c.expires_at)
            ).all()
        return as_records(CheckpointRecord, rows)

    def all_folders(self) -> set[str]:
        """Every folder that a checkpoint, a sampler or a snapshot refers to. Any other is rubbish."""
        with self._read() as connection:
            found = [
                *connection.scalars(select(checkpoints.c.folder)),
                *connection.scalars(select(samplers.c.folder)),
                *connection.scalars(select(runs.c.snapshot)),
            ]
        return {folder for folder in found if folder is not None}

    def usage(self, tenant: str | None = None) -> tuple[int, int]:
        """How many checkpoints there are, and their bytes."""
        wanted = select(func.count(), func.coalesce(func.sum(checkpoints.c.size_bytes), 0)).select_from(checkpoints)
        if tenant is not None:
            wanted = wanted.where(checkpoints.c.tenant == tenant)
        with self._read() as connection:
            count, size = connection.execute(wanted).one()
        return int(count), int(size)

    def _set_checkpoint(self, path: str, **values: Any) -> None:
        with self._write() as connection:
            connection.execute(update(checkpoints).where(checkpoints.c.path == path).values(**values))


def put_checkpoint(connection: Connection, checkpoint: CheckpointRecord) -> CheckpointRecord | None:
    """Put it in the place of the former one. Samplers of that one go on with its files, which are then not returned."""
    former = _take(connection, checkpoint.path)
    connection.execute(insert(checkpoints), values_of(checkpoint))
    if former is None:
        return None
    is_its_sampler = (samplers.c.model_path == former.path, samplers.c.folder.is_(None))
    kept = connection.execute(update(samplers).where(*is_its_sampler).values(folder=former.folder)).rowcount
    return None if kept else former


def _take(connection: Connection, path: str, expired_by: float | None = None) -> CheckpointRecord | None:
    gone = delete(checkpoints).where(checkpoints.c.path == path)
    if expired_by is not None:
        gone = gone.where(checkpoints.c.expires_at <= expired_by)
    row = connection.execute(gone.returning(checkpoints)).first()
    return None if row is None else as_record(CheckpointRecord, row)
