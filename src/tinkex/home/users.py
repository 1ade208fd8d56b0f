"""Who uses the service of a data folder: each user is a locked file in `users/`.

The kernel releases the lock however the process ends, so a user that was killed is no user any more.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tinkex.home.lock import lock, unlock

USERS = "users"


class UserLock:
    """Makes this process a user of the folder's service, from the constructor to `release()`."""

    def __init__(self, folder: Path) -> None:
        users = folder / USERS
        users.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._owner = os.getpid()
        while True:
            self._file = users / f"{self._owner}-{os.urandom(4).hex()}"
            fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                lock(fd)
                is_ours = self._file.exists()
            except BlockingIOError:
                is_ours = False
            if is_ours:
                self._fd: int | None = fd
                return
            os.close(fd)  # `user_pids` found it before it was locked, and removed it

    def release(self) -> None:
        """Leave. Garbage collection may call this anywhere; in a forked child it does nothing."""
        if self._fd is None or os.getpid() != self._owner:
            return
        fd, self._fd = self._fd, None
        with suppress(OSError):
            self._file.unlink()
        with suppress(OSError):
            unlock(fd)  # a forked child has the descriptor too
        os.close(fd)


def user_pids(folder: Path) -> list[int]:
    """Return the process ids of the service's users, one for each use. Removes the files of users that have ended."""
    try:
        files = list((folder / USERS).iterdir())
    except OSError:
        return []
    return [int(file.name.partition("-")[0]) for file in files if _is_held(file)]


def _is_held(file: Path) -> bool:
    try:
        fd = os.open(file, os.O_RDWR)
    except OSError:
        return False
    try:
        lock(fd)
        with suppress(OSError):
            file.unlink()  # while it is locked: nobody can take it between the two
        unlock(fd)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
