"""The errors of the store, and the translation of driver errors. Messages hold neither paths nor passwords."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from tinkex.errors import ConfigError, TinkexError
from tinkex.store.disk import is_full
from tinkex.store.records import OperationRecord

_PG_DISK_FULL = "53100"
_PG_IDLE_IN_TRANSACTION = "25P03"
"""This program was frozen inside a transaction, which PostgreSQL has rolled back. psycopg does not call it a lost
connection."""
_SQLITE_IOERR_SHMSIZE = 4874
"""The memory map beside the WAL could not grow: the disk is full there too."""


class Duplicate(TinkexError):
    """The run already has an operation with this sequence number. `existing` is that operation."""

    def __init__(self, existing: OperationRecord) -> None:
        super().__init__(f"Operation {existing.seq_id} of run {existing.run_id} was accepted before.")
        self.existing = existing

    def __reduce__(self) -> tuple[type[Duplicate], tuple[OperationRecord]]:
        return Duplicate, (self.existing,)


class DiskFull(TinkexError):
    """The disk is full. The write was rolled back; everything stored before it is intact."""

    retryable = True

    def __init__(self, message: str = "") -> None:
        super().__init__(
            message
            or "The service's disk is full, so this was not stored. Free space (delete checkpoints, or run "
            "`tinkex gc`), then send it again."
        )


class Unavailable(TinkexError):
    """The database did not respond, so it is unknown whether the write was stored."""

    retryable = True


class BucketAway(TinkexError):
    """The bucket of the service's files did not respond, or rejected its credentials. Nothing is lost: try again."""

    retryable = True
    is_denied = False


class DamagedBlob(TinkexError):
    """A stored file is not what was written: its size or its checksum is another one."""


class LeaseLost(TinkexError):
    """Another server has taken over this store. The write was rolled back; nothing of it is stored."""

    retryable = True

    def __init__(self) -> None:
        super().__init__(
            "Another server has taken over this service's database, so this one stores nothing any more and stops. "
            "Send the request again."
        )


class DatabaseAway(ConfigError):
    """No database responds at the address: it may be starting, or the address may be wrong."""


class HomeLost(TinkexError):
    """Another node works on this run now. The write was rolled back; nothing of it is stored."""

    retryable = True

    def __init__(self, run_id: str) -> None:
        super().__init__(f"Another server works on {run_id} now. Send the request again.")


class RunDeleted(TinkexError):
    """The run was deleted. Nothing of the write is stored."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"training run {run_id!r} is not known: it was deleted.")


@contextmanager
def translated() -> Iterator[None]:
    """Raise driver errors as ours, except those that are neither a full disk nor a lost database: they are bugs."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise _translate(error) from error
    except DBAPIError as error:
        is_lost = error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError))
        if is_lost or getattr(error.orig, "sqlstate", None) == _PG_IDLE_IN_TRANSACTION:
            raise _translate(error.orig) from error
        raise
    except OSError as error:
        if is_full(error):
            raise DiskFull from error
        raise


def _translate(cause: BaseException | None) -> TinkexError:
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", 0)
        if code in (sqlite3.SQLITE_FULL, _SQLITE_IOERR_SHMSIZE):
            return DiskFull()
        if (code & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return Unavailable("Another program has locked the database for too long. Try again.")
        return Unavailable(f"The database file cannot be used ({cause}). Check the disk and the permissions.")
    if getattr(cause, "sqlstate", None) == _PG_DISK_FULL:
        return DiskFull()
    return Unavailable("The database does not respond. Check that it runs and can be reached, then try again.")
