"""The store of checkpoints: where each lies, which tenant owns it, when it expires."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, delete, func, insert, or_, select, update

from tinkex.store.database import Database, as_record, values_of
from tinkex.store.records import CheckpointRecord
from tinkex.store.tables import checkpoints, runs, samplers


class CheckpointStore(Database):
    def add_checkpoint(self, checkpoint: CheckpointRecord) -> CheckpointRecord | None:
        """Add a checkpoint. One with the same path is replaced, and returned if its files can be deleted."""
        with self._write() as connection:
            return put_checkpoint(connection, checkpoint)

    def get_checkpoint(self, path: str) -> CheckpointRecord | None:
        return self._first(CheckpointRecord, select(checkpoints).where(checkpoints.c.path == path))

    def get_live_checkpoint(self, path: str, now: float) -> CheckpointRecord | None:
        """Return a checkpoint that has not expired. An expired one is gone at once, deleted or not."""
        return self._first(CheckpointRecord, select(checkpoints).where(checkpoints.c.path == path, _is_live(now)))

    def get_readable_checkpoint(self, path: str, tenant: str, now: float) -> CheckpointRecord | None:
        """Return a live checkpoint that this tenant may read: its own, or one that its owner published."""
        checkpoint = self.get_live_checkpoint(path, now)
        if checkpoint is None or not (checkpoint.tenant == tenant or checkpoint.is_public):
            return None
        return checkpoint

    def list_checkpoints(
        self, tenant: str, run_id: str | None, offset: int, limit: int, now: float
    ) -> tuple[list[CheckpointRecord], int]:
        """Return a page of those that have not expired, newest first, and how many there are in all."""
        query = select(checkpoints).where(checkpoints.c.tenant == tenant, _is_live(now))
        if run_id is not None:
            query = query.where(checkpoints.c.run_id == run_id)
        newest_first = (checkpoints.c.created_at.desc(), checkpoints.c.path.desc())
        return self._page(CheckpointRecord, query.order_by(*newest_first), offset, limit)

    def delete_checkpoint(self, path: str, *, expired_by: float | None = None) -> CheckpointRecord | None:
        """Delete the row and return it, so that the caller can delete its folder.

        With `expired_by`, only if it has expired by then: a new checkpoint may have been saved under its path since the
        caller looked it up.
        """
        with self._write() as connection:
            return _delete_row(connection, path, expired_by)

    def set_public(self, path: str, is_public: bool) -> None:
        self._run_write(update(checkpoints).where(checkpoints.c.path == path).values(is_public=is_public))

    def set_expiry(self, path: str, expires_at: float | None) -> None:
        self._run_write(update(checkpoints).where(checkpoints.c.path == path).values(expires_at=expires_at))

    def expired_checkpoints(self, now: float) -> list[CheckpointRecord]:
        expired = select(checkpoints).where(checkpoints.c.expires_at <= now)
        return self._all(CheckpointRecord, expired.order_by(checkpoints.c.expires_at))

    def all_folders(self) -> set[str]:
        """Return every folder that a checkpoint, a sampler or a snapshot refers to. All others can be deleted."""
        with self._read() as connection:
            folders = [
                *connection.scalars(select(checkpoints.c.folder)),
                *connection.scalars(select(samplers.c.folder)),
                *connection.scalars(select(runs.c.snapshot)),
            ]
        return {folder for folder in folders if folder is not None}

    def usage(self, tenant: str | None = None) -> tuple[int, int]:
        """Return how many checkpoints there are, and their size in bytes."""
        query = select(func.count(), func.coalesce(func.sum(checkpoints.c.size_bytes), 0)).select_from(checkpoints)
        if tenant is not None:
            query = query.where(checkpoints.c.tenant == tenant)
        with self._read() as connection:
            count, size = connection.execute(query).one()
        return int(count), int(size)


def put_checkpoint(connection: Connection, checkpoint: CheckpointRecord) -> CheckpointRecord | None:
    """Insert a checkpoint in place of one with the same path, and return the replaced one if its files can be deleted.

    Samplers of the replaced checkpoint keep its files; it is not returned then.
    """
    replaced = _delete_row(connection, checkpoint.path)
    connection.execute(insert(checkpoints), values_of(checkpoint))
    if replaced is None:
        return None
    uses_it = (samplers.c.model_path == replaced.path, samplers.c.folder.is_(None))
    users = connection.execute(update(samplers).where(*uses_it).values(folder=replaced.folder)).rowcount
    return None if users else replaced


def _is_live(now: float) -> ColumnElement[bool]:
    return or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > now)


def _delete_row(connection: Connection, path: str, expired_by: float | None = None) -> CheckpointRecord | None:
    statement = delete(checkpoints).where(checkpoints.c.path == path)
    if expired_by is not None:
        statement = statement.where(checkpoints.c.expires_at <= expired_by)
    row = connection.execute(statement.returning(checkpoints)).first()
    return None if row is None else as_record(CheckpointRecord, row)
