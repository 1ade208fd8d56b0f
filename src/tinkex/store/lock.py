"""One server per data folder. The operating system holds the lock: it goes with the process, however that ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from tinkex.errors import ConfigError

_FAR = 1 << 30
"""Windows locks bytes, and a locked byte cannot be read: lock one far behind the pid."""


class DataLock:
    """`with DataLock(data_dir):` holds the folder; a second holder is refused and told who has it."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / "lock"
        self._fd: int | None = None

    def acquire(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(fd)
        except BlockingIOError:
            os.lseek(fd, 0, os.SEEK_SET)
            holder = os.read(fd, 32).decode("ascii", "replace").strip()
            os.close(fd)
            raise ConfigError(
                f"Another server (pid {holder or 'unknown'}) uses this data folder. Stop it, or give this one a "
                "folder of its own with --data-dir."
            ) from None
        except OSError as problem:
            os.close(fd)
            raise ConfigError(
                f"The data folder cannot be locked ({problem.strerror}). Choose one on a local disk with --data-dir."
            ) from problem
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, f"{os.getpid()}\n".encode("ascii"))
        self._fd = fd

    def release(self) -> None:
        """Let go. The file stays: removing it would let two servers lock two files of one name."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.ftruncate(fd, 0)
            _unlock(fd)  # Said, not left to close(): a child that is just being started still has the descriptor.
            os.close(fd)

    def __enter__(self) -> DataLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


if sys.platform == "win32":
    import msvcrt

    def _lock(fd: int) -> None:
        os.lseek(fd, _FAR, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as problem:
            raise BlockingIOError from problem

    def _unlock(fd: int) -> None:
        os.lseek(fd, _FAR, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _lock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
