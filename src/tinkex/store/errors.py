"""What the store raises, and how a driver's error becomes one of these. Messages name neither paths nor passwords."""

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
    """The run already has an operation with this number. `existing` is the one that stands."""

    def __init__(self, existing: OperationRecord) -> None:
        super().__init__(f"Operation {existing.seq_id} of run {existing.run_id} was accepted before.")
        self.existing = existing

    def __reduce__(self) -> tuple[type[Duplicate], tuple[OperationRecord]]:
        return Duplicate, (self.existing,)


class DiskFull(TinkexError):
    """There is no room for what should be kept. What was being written is undone; everything before it stands."""

    retryable = True

    def __init__(self, message: str = "") -> None:
        super().__init__(
            message
            or "The service's disk is full, so this was not kept. Free space (delete checkpoints, or run `tinkex gc`), "
            "then send it again."
        )


class Unavailable(TinkexError):
    """The database gave no answer, so what was being written may not stand."""

    retryable = True


@contextmanager
def translated() -> Iterator[None]:
    """The driver's errors as ours. What is neither a full disk nor a silent database is a defect: it stays."""
    try:
        yield
    except sqlite3.OperationalError as problem:
        raise _translate(problem) from problem
    except DBAPIError as problem:
        if problem.connection_invalidated or isinstance(problem, (OperationalError, InterfaceError)):
            raise _translate(problem.orig) from problem
        raise
    except OSError as problem:
        if problem.errno in _FULL_ERRNOS:
            raise DiskFull from problem
        raise


def _translate(cause: BaseException | None) -> TinkexError:
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", 0)
        if code in (sqlite3.SQLITE_FULL, _SQLITE_IOERR_SHMSIZE):
            return DiskFull()
        if (code & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return Unavailable("Another program holds the database and did not let go in time. Try again.")
        return Unavailable(f"The database file cannot be used ({cause}). Check the disk and the permissions.")
    if getattr(cause, "sqlstate", None) == _PG_DISK_FULL:
        return DiskFull()
    return Unavailable("The database does not answer. Check that it runs and can be reached, then try again.")
