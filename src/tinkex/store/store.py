"""The store as one object. It is used by one thread at a time, and every method is one transaction."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from sqlalchemy import insert, select, update
from sqlalchemy.exc import DatabaseError

from tinkex.errors import ConfigError
from tinkex.store.access import AccessStore
from tinkex.store.blobs.bucket import Bucket
from tinkex.store.blobs.bucket_folders import BucketFolders
from tinkex.store.blobs.data_folder import DataFolder
from tinkex.store.checkpoints import CheckpointStore, put_checkpoint
from tinkex.store.database import Durability, connect, connect_alone, sqlite_connection, values_of
from tinkex.store.errors import DatabaseAway, DiskFull, Duplicate, Unavailable
from tinkex.store.journal import existing_operation
from tinkex.store.lease import Lease, check_not_served, lease_for
from tinkex.store.migrations import migrate
from tinkex.store.payloads import Payloads, StoredPayload
from tinkex.store.records import CheckpointRecord, OperationRecord, RunRecord, SessionRecord
from tinkex.store.run_records import RunStore
from tinkex.store.runs.logged_store import LoggedStore
from tinkex.store.runs.long_runs import LongRunStore
from tinkex.store.sessions import SessionStore, insert_session
from tinkex.store.tables import (
    audit,
    checkpoints,
    operations,
    payloads,
    remembered_responses,
    runs,
    samplers,
    secrets,
    sessions,
)


class Freed(NamedTuple):
    """What a cleanup of the bucket deleted: folders with their bytes, and how many payloads."""

    folders: dict[str, int]
    files: int


logger = logging.getLogger("tinkex.store")


class Store(SessionStore, RunStore, LongRunStore, CheckpointStore, AccessStore, LoggedStore):
    folders: DataFolder
    """Checkpoints, samplers' weights and snapshots. Unlike rows, any thread may use it."""

    @classmethod
    def open(
        cls,
        url: str,
        data_dir: Path,
        *,
        durability: Durability = "normal",
        bucket: Bucket | None = None,
        cache_bytes: int = 0,
    ) -> Self:
        """Connect, and upgrade the database to this release. Raises ConfigError if a server of an older one writes it,
        and DatabaseAway if none responds.

        "normal" survives the death of any process; "full" also survives a power failure, at the price of a disk flush
        per call (on PostgreSQL its own settings decide). Files lie in the data folder or, with a bucket, there;
        `cache_bytes` bounds their copies on this machine.
        """
        engine = connect(url, durability)
        files = Payloads(data_dir / "journal", is_synced=durability == "full", bucket=bucket)
        store = cls(engine, files)
        store.folders = DataFolder(data_dir) if bucket is None else BucketFolders(data_dir, bucket, cache_bytes)

        def upgrade() -> None:
            with store._write() as connection:
                migrate(connection, check=check_not_served)

        try:
            store._use_reserve(upgrade)  # a server on a full disk must start: its clients delete checkpoints
        except (DatabaseError, Unavailable) as error:
            store.close()
            message = _driver_message(error)
            kind = DatabaseAway if engine.dialect.name != "sqlite" and _is_away(message) else ConfigError
            raise kind(f"The database cannot be opened: {message}") from error
        except BaseException:
            store.close()
            raise
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add_stored_run(
        self,
        run: RunRecord,
        creation: OperationRecord,
        checkpoint: CheckpointRecord,
        *,
        session: SessionRecord | None = None,
        key: str = "",
        response: bytes = b"",
    ) -> None:
        """Add a run that only owns a checkpoint, with its session if that is new. All of it is there, or nothing.

        Raises Duplicate if the run exists. The response is remembered under the idempotency key, if there is one.
        """
        with self._write() as connection:
            if session is not None:
                insert_session(connection, session)
            if not connection.execute(self._insert_new(runs), values_of(run)).rowcount:
                raise Duplicate(existing_operation(connection, creation))
            self._insert_operation(connection, creation, StoredPayload(b"", None))
            put_checkpoint(connection, checkpoint)
            if key:
                values = {"tenant": run.tenant, "key": key, "answer": response, "at": run.created_at}
                connection.execute(insert(remembered_responses), values)

    @contextmanager
    def lease(self, address: str, data_dir: Path) -> Iterator[Lease]:
        """Be the one server that writes this store. Raises ConfigError, with its address, if another one is.

        Programs beside a server (`tinkex key`, `gc`, `backup`) take no lease, and their writes are not checked.
        """
        lease = lease_for(self._engine, lambda: connect_alone(self._engine), address, data_dir)

        def acquire() -> str | None:
            try:
                with self._write() as connection:
                    return lease.acquire(connection)
            except DiskFull:
                lease.release()
                raise

        try:
            former = self._use_reserve(acquire)  # on a full disk too: clients delete checkpoints
            lease.keep()
            if former is not None and former != str(data_dir) and not self.folders.is_shared:
                self._report_missing(former, data_dir)
            self._fence = lease.check
            yield lease
        finally:
            self._fence = None
            lease.release()

    def all_files(self) -> set[str]:
        """Return every folder and file beside the database that a row refers to, relative to the data folder."""
        with self._read() as connection:
            names = [name for name in connection.scalars(select(payloads.c.file)) if name is not None]
        return {*self.all_folders(), *(f"journal/{name[:2]}/{name}" for name in names)}

    def _report_missing(self, former: str, data_dir: Path) -> None:
        """Warn if what rows refer to was left in the former data folder. One that was moved or restored is whole."""
        missing = sorted(name for name in self.all_files() if not (data_dir / name).exists())
        if missing:
            logger.warning(
                "this database was served with the data folder %s before; %d of the checkpoints, snapshots and "
                "payloads that it refers to are not in %s and cannot be read (the first is %s). Copy them here",
                *(former, len(missing), data_dir, missing[0]),
            )

    def ping(self) -> None:
        """Ask the database for nothing. Raises Unavailable if it does not respond."""
        with self._read() as connection:
            connection.execute(select(1))

    def put_payload(self, content: bytes) -> StoredPayload:
        """Put large bytes where a row will name them. Any thread may do it, before its transaction."""
        return self._payloads.write(content)

    def read_payload(self, payload: StoredPayload) -> bytes:
        """Return what `find_payload` found. Any thread may do it."""
        return self._payloads.read(payload)

    def shared_secret(self, name: str, proposed: str) -> str:
        """Return the secret of this name, which is the proposed one if there was none."""
        with self._write() as connection:
            connection.execute(self._insert_new(secrets), {"name": name, "content": proposed})
            return str(connection.scalar(select(secrets.c.content).where(secrets.c.name == name)))

    def move_tenant(self, former: str, tenant: str) -> int:
        """Give all that a tenant has to another one. Returns how many runs that are."""
        with self._write() as connection:
            if connection.scalar(select(sessions.c.id).where(sessions.c.tenant == former).limit(1)) is None:
                return 0
            moved = 0
            for table in (sessions, runs, operations, samplers, checkpoints, audit, remembered_responses):
                done = connection.execute(update(table).where(table.c.tenant == former).values(tenant=tenant))
                moved += done.rowcount if table is runs else 0
            return moved

    def sweep(self) -> int:
        """Remove payload files that no row refers to (a crash leaves some); returns how many. Needs the data lock."""
        return self._payloads.sweep(self._payload_files())

    def _payload_files(self) -> set[str]:
        with self._read() as connection:
            return {name for name in connection.scalars(select(payloads.c.file)) if name is not None}

    def referenced(self) -> tuple[set[str], set[str]]:
        """Return every folder and every payload file that a row refers to."""
        return self.all_folders(), self._payload_files()

    def remove_orphans(
        self, referenced: tuple[set[str], set[str]], before: float, *, is_dry_run: bool = False
    ) -> Freed:
        """Delete what the bucket has and no row refers to, unless it is new. Any thread may do it.

        Lists the whole bucket. What is written after `referenced` was read is new, so it stays.
        """
        if not isinstance(self.folders, BucketFolders):
            return Freed({}, 0)
        folders = self.folders.orphans(referenced[0], before)
        files = self._payloads.orphans(referenced[1], before)
        if not is_dry_run:
            for folder in folders:
                self.folders.remove(folder)
            self.folders.bucket.delete(files)
        return Freed(folders, len(files))

    def backup(self, target: Path) -> None:
        """Write a consistent copy of the database to `target` while it is in use.

        Payload files are not included: copy `journal/` and `checkpoints/` after it.
        """
        if self._engine.dialect.name != "sqlite":
            raise ConfigError("A PostgreSQL database is backed up with its own tool: run pg_dump on it.")
        if target.exists():
            raise ConfigError(f"{target.name} exists already. Name a file that does not exist.")
        unfinished = target.with_name(target.name + ".part")
        unfinished.unlink(missing_ok=True)
        try:
            with self._read() as connection:
                copy = sqlite3.connect(unfinished)
                try:
                    sqlite_connection(connection).backup(copy)
                    copy.execute("PRAGMA journal_mode = DELETE")  # One file, with nothing beside it.
                finally:
                    copy.close()
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)


def _is_away(message: str) -> bool:
    """Whether PostgreSQL may respond later. It says FATAL to a wrong password or name, and while it starts or ends."""
    return "FATAL" not in message or any(word in message for word in ("starting up", "shutting down", "recovery mode"))


def _driver_message(error: DatabaseError | Unavailable) -> str:
    """Return the driver's message, for the person who starts the server. It holds host and user, never the password."""
    cause = error if isinstance(error, DatabaseError) else error.__cause__
    message = str(getattr(cause, "orig", None) or cause).strip()
    return message.splitlines()[0] if message else "it gave no reason"
