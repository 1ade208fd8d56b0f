"""A lock file that one process holds: in a data folder, or beside a SQLite database.

The operating system holds the lock and releases it however the process ends.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from tinkex.clock import REAL
from tinkex.errors import ConfigError

LOCK_FILE = "lock"
_FAR = 1 << 30
"""Windows locks bytes, and a locked byte cannot be read: lock one far behind the process id in the file."""
_TRIES, _PAUSE_S = 5, 0.02
"""`is_locked` holds a lock for some microseconds, and must not make a server fail that starts just then."""


class Locked(ConfigError):
    """Another server has the lock."""


class FileLock:
    """`with FileLock(data_dir):` locks the folder. A second server gets an error with the process id of the first."""

    def __init__(self, data_dir: Path, name: str = LOCK_FILE, *, address: str = "", is_shared: bool = False) -> None:
        """`is_shared`: several may hold it, but none beside one that is not shared."""
        self._path, self._address, self._is_shared = data_dir / name, address, is_shared
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock. The error that a second server gets has the address of the first."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            is_ours = _try(fd, is_shared=self._is_shared)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"The data folder cannot be locked ({error.strerror}). Choose one on a local disk with --data-dir."
            ) from error
        if not is_ours:
            pid, address = _holder(fd)
            os.close(fd)
            raise Locked(
                f"Another server{address and ' at '}{address} (pid {pid or 'unknown'}) uses this data folder. Stop it, "
                "or choose another folder with --data-dir."
            )
        with suppress(OSError):  # on a full disk the lock holds without it
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, f"{f'{os.getpid()} {self._address}'.strip()}\n".encode())
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.ftruncate(fd, 0)
            unlock(fd)  # Not left to close(): a child process that is just being started still has the descriptor.
            os.close(fd)

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_locked(folder: Path, name: str = LOCK_FILE) -> bool:
    """Return whether a process holds a lock file of this folder that is not shared."""
    return holder_pid(folder, name) is not None


def holder_pid(folder: Path, name: str = LOCK_FILE) -> int | None:
    """Return the id of the process that holds a lock file; None if none does. 0: the process has not written its id."""
    try:
        fd = os.open(folder / name, os.O_RDWR)
    except OSError:
        return None
    try:
        lock(fd, is_shared=True)
        unlock(fd)
        return None
    except BlockingIOError:
        pid = _holder(fd)[0]
        return int(pid) if pid.isdigit() else 0
    except OSError:
        return None  # a file system without locks, where no server can be either
    finally:
        os.close(fd)


def _try(fd: int, *, is_shared: bool) -> bool:
    for attempt in range(_TRIES):
        if attempt:
            REAL.pause(_PAUSE_S)
        with suppress(BlockingIOError):
            lock(fd, is_shared=is_shared)
            return True
    return False


def _holder(fd: int) -> tuple[str, str]:
    """Return the process id and the address that the holder has written."""
    os.lseek(fd, 0, os.SEEK_SET)
    pid, _, address = os.read(fd, 1024).decode("utf-8", "replace").strip().partition(" ")
    return pid, address


if sys.platform == "win32":
    import msvcrt

    def lock(fd: int, *, is_shared: bool = False) -> None:  # Windows has no shared one
        """Lock an open file, or raise BlockingIOError."""
        os.lseek(fd, _FAR, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError from error

    def unlock(fd: int) -> None:
        os.lseek(fd, _FAR, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def lock(fd: int, *, is_shared: bool = False) -> None:
        """Lock an open file, or raise BlockingIOError."""
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def unlock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
