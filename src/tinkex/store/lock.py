"""A lock file that one process holds: in a data folder, or beside a SQLite database.

The operating system holds the lock and releases it however the process ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.store.disk import is_full

_FAR = 1 << 30
"""Windows locks bytes, and a locked byte cannot be read: lock one far behind the process id in the file."""


class Locked(ConfigError):
    """Another server has the lock."""


class FileLock:
    """`with FileLock(data_dir):` locks the folder. A second server gets an error with the process id of the first."""

    def __init__(self, data_dir: Path, name: str = "lock", *, address: str = "", is_shared: bool = False) -> None:
        """`is_shared`: several may hold it, but none beside one that is not shared."""
        self._path, self._address, self._is_shared = data_dir / name, address, is_shared
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock. The error that a second server gets has the address of the first."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(fd, is_shared=self._is_shared)
        except BlockingIOError:
            os.lseek(fd, 0, os.SEEK_SET)
            pid, _, holder = os.read(fd, 1024).decode("utf-8", "replace").strip().partition(" ")
            os.close(fd)
            raise Locked(
                f"Another server{holder and ' at '}{holder} (pid {pid or 'unknown'}) uses this data folder. Stop it, "
                "or choose another folder with --data-dir."
            ) from None
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"The data folder cannot be locked ({error.strerror}). Choose one on a local disk with --data-dir."
            ) from error
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            os.write(fd, f"{f'{os.getpid()} {self._address}'.strip()}\n".encode())
        except OSError as error:  # the lock holds without it
            if not is_full(error):
                raise
        self._fd = fd

    def release(self) -> None:
        """Release the lock. The file stays: removing it would let two servers lock two files of one name."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.ftruncate(fd, 0)
            _unlock(fd)  # Not left to close(): a child process that is just being started still has the descriptor.
            os.close(fd)

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


if sys.platform == "win32":
    import msvcrt

    def _lock(fd: int, *, is_shared: bool) -> None:  # Windows has no shared one
        os.lseek(fd, _FAR, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError from error

    def _unlock(fd: int) -> None:
        os.lseek(fd, _FAR, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _lock(fd: int, *, is_shared: bool) -> None:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def _unlock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
