"""The store as one object. It is used by one thread at a time, and every method is one transaction."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.exc import DatabaseError

from tinkex.errors import ConfigError
from tinkex.store.access import AccessStore
from tinkex.store.checkpoints import CheckpointStore
from tinkex.store.database import Durability, connect, sqlite_connection
from tinkex.store.errors import Unavailable
from tinkex.store.journal import Journal
from tinkex.store.migrations import migrate
from tinkex.store.payloads import Payloads
from tinkex.store.sessions import SessionStore
from tinkex.store.tables import payloads


class Store(SessionStore, Journal, CheckpointStore, AccessStore):
    @classmethod
    def open(cls, url: str, data_dir: Path, *, durability: Durability = "normal") -> Store:
        """Connect, and upgrade the database to this release.

        "normal" survives the death of any process; "full" also survives a power failure, at the price of a disk flush
        per call (on PostgreSQL its own settings decide).
        """
        engine = connect(url, durability)
        store = cls(engine, Payloads(data_dir / "journal", is_synced=durability == "full"))
        try:
            with store._write() as connection:
                migrate(connection)
        except (DatabaseError, Unavailable) as error:
            store.close()
            raise ConfigError(f"The database cannot be opened: {_driver_message(error)}") from error
        except BaseException:
            store.close()
            raise
        return store

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def sweep(self) -> int:
        """Remove payload files that no row refers to (a crash leaves some); returns how many. Needs the data lock."""
        with self._read() as connection:
            referenced = {name for name in connection.scalars(select(payloads.c.file)) if name is not None}
        return self._payloads.sweep(referenced)

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


def _driver_message(error: DatabaseError | Unavailable) -> str:
    """Return the driver's message, for the person who starts the server. It holds host and user, never the password."""
    cause = error if isinstance(error, DatabaseError) else error.__cause__
    message = str(getattr(cause, "orig", None) or cause).strip()
    return message.splitlines()[0] if message else "it gave no reason"
