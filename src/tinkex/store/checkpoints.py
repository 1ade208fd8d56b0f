"""The store of checkpoints: where each lies, which tenant owns it, when it expires."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, delete, func, insert, or_, select, update

from tinkex.store.database import Database, as_record, values_of
from tinkex.store.records import AuditEntry, CheckpointRecord
from tinkex.store.tables import audit, checkpoints, runs, samplers

_NEWEST_FIRST = (checkpoints.c.created_at.desc(), checkpoints.c.path.desc())


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
        if run_id is None:
            query = select(checkpoints).where(checkpoints.c.tenant == tenant, _is_live(now))
        else:
            # An expression and not the column: SQLite would otherwise read all checkpoints of the tenant, by the index
            # `checkpoints_by_tenant`, to find the few of the run.
            is_own = checkpoints.c.tenant.concat("") == tenant
            query = select(checkpoints).where(checkpoints.c.run_id == run_id, is_own, _is_live(now))
        return self._page(CheckpointRecord, query.order_by(*_NEWEST_FIRST), offset, limit)

    def newest_checkpoints(self, run_ids: Sequence[str], now: float) -> list[CheckpointRecord]:
        """Return the newest live checkpoint of each kind of these runs, with one query for all of them."""
        rank = func.row_number().over(
            partition_by=(checkpoints.c.run_id, checkpoints.c.kind), order_by=list(_NEWEST_FIRST)
        )
        ranked = select(checkpoints, rank.label("rank_by_age")).where(checkpoints.c.run_id.in_(run_ids), _is_live(now))
        rows = ranked.subquery()
        newest = select(*(rows.c[column.name] for column in checkpoints.columns)).where(rows.c.rank_by_age == 1)
        return self._all(CheckpointRecord, newest)

    def newest_sampler_weights(self, tenant: str, now: float) -> CheckpointRecord | None:
        """Return what a tenant saved for sampling last."""
        own = (checkpoints.c.tenant == tenant, checkpoints.c.kind == "sampler_weights", _is_live(now))
        return self._first(CheckpointRecord, select(checkpoints).where(*own).order_by(*_NEWEST_FIRST).limit(1))

    def delete_checkpoint(
        self, path: str, *, expired_by: float | None = None, entry: AuditEntry | None = None
    ) -> CheckpointRecord | None:
        """Delete the row and return it, so that the caller can delete its folder. Works on a full disk too.

        With `expired_by`, only if it has expired by then: a new checkpoint may have been saved under its path since the
        caller looked it up. `entry` goes into the audit log with it.
        """

        def run() -> CheckpointRecord | None:
            with self._write() as connection:
                deleted = _delete_row(connection, path, expired_by)
                if deleted is not None and entry is not None:
                    connection.execute(insert(audit), values_of(entry))
                return deleted

        return self._use_reserve(run)

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

    def bytes_by_tenant(self, *, without_path: str = "") -> dict[str, int]:
        """Return the size of each tenant's checkpoints, without the checkpoint of that path."""
        query = select(checkpoints.c.tenant, func.sum(checkpoints.c.size_bytes)).group_by(checkpoints.c.tenant)
        with self._read() as connection:
            rows = connection.execute(query.where(checkpoints.c.path != without_path)).all()
        return {tenant: int(size) for tenant, size in rows}

    def usage(self, tenant: str | None = None) -> tuple[int, int]:
        """Return how many checkpoints there are, and their size in bytes."""
        query = select(func.count(), func.coalesce(func.sum(checkpoints.c.size_bytes), 0)).select_from(checkpoints)
        if tenant is not None:
            query = query.where(checkpoints.c.tenant == tenant)
        with self._read() as connection:
            count, size = connection.execute(query).one()
        return int(count), int(size)

    def session_usage(self, session_id: str, now: float) -> tuple[int, int]:
        """Return how many live checkpoints the runs of a session have, and their size in bytes."""
        of_session = select(runs.c.id).where(runs.c.session_id == session_id)
        query = select(func.count(), func.coalesce(func.sum(checkpoints.c.size_bytes), 0)).select_from(checkpoints)
        with self._read() as connection:
            count, size = connection.execute(query.where(checkpoints.c.run_id.in_(of_session), _is_live(now))).one()
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
    kept = {"folder": replaced.folder, "size_bytes": replaced.size_bytes}
    users = connection.execute(update(samplers).where(*uses_it).values(**kept)).rowcount
    return None if users else replaced


def _is_live(now: float) -> ColumnElement[bool]:
    return or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > now)


def _delete_row(connection: Connection, path: str, expired_by: float | None = None) -> CheckpointRecord | None:
    statement = delete(checkpoints).where(checkpoints.c.path == path)
    if expired_by is not None:
        statement = statement.where(checkpoints.c.expires_at <= expired_by)
    row = connection.execute(statement.returning(checkpoints)).first()
    return None if row is None else as_record(CheckpointRecord, row)
