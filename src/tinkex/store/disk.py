"""Brings files to the disk, and keeps a reserve of space, so that rows can be deleted when the disk is full."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

logger = logging.getLogger("tinkex.store")

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
RESERVE_BYTES = 4 << 20
PIECE_BYTES = 256 << 10
"""A delete writes some ten pages of 4 KiB to the log of SQLite. What is given up beyond that, others may take."""
_BLOCK = 1 << 16


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the disk, or the quota of this user on it, is full."""
    return isinstance(error, OSError) and error.errno in FULL_ERRNOS


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if os.name != "posix" and path.is_dir():
        return  # Windows keeps the name with the file and opens no folders.
    fd = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Reserve:
    """A file beside the database that only takes space. When the disk is full, it is given up piece by piece."""

    def __init__(self, file: Path, size: int = RESERVE_BYTES) -> None:
        self._file, self._size = file, size

    def fill(self) -> None:
        """Make the file as large as it should be, or as the disk allows: little is better than nothing."""
        try:
            with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as out:
                while (missing := self._size - out.tell()) > 0:
                    # Random: a file system that compresses would reserve nothing for zeros.
                    out.write(os.urandom(min(_BLOCK, missing)))
        except OSError as error:
            if not is_full(error):
                logger.warning("no space is reserved for deletes on a full disk: %s", error)

    def give_up(self) -> bool:
        """Give a piece of the file back to the disk. Returns False if nothing is left of it."""
        try:
            size = self._file.stat().st_size
            if size:
                os.truncate(self._file, max(size - PIECE_BYTES, 0))
        except OSError:
            return False
        if size:
            logger.warning("the disk is full; rows are deleted with the help of the space that is reserved for it")
        return size > 0
