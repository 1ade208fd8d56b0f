"""The errors of the store, and the translation of driver errors. Messages hold neither paths nor passwords."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from tinkex.errors import TinkexError
from tinkex.store.records import OperationRecord

_FULL_ERRNOS = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_PG_DISK_FULL = "53100"
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


@contextmanager
def translated() -> Iterator[None]:
    """Raise driver errors as ours, except those that are neither a full disk nor a lost database: they are bugs."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise _translate(error) from error
    except DBAPIError as error:
        if error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError)):
            raise _translate(error.orig) from error
        raise
    except OSError as error:
        if error.errno in _FULL_ERRNOS:
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
