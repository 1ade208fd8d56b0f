"""Copies all data of a service while it runs.

Only the database can be copied at one moment; folders and files beside it come and go meanwhile. But they are complete
before a row refers to them, never change afterwards, and are deleted only when no row refers to them any more. So:
copy the database, then everything it refers to, and repeat until a copy of the database refers only to what was copied
before it and has not changed since. Each such file existed, complete, both before and after it was copied.

What lies in a bucket is fetched: a copy is whole, and a server without a bucket can be started on it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tinkex.errors import TinkexError, ValidationError
from tinkex.store.payloads import StoredPayload, in_bucket
from tinkex.store.store import Store

DATABASE = "tinkex.db"
MAX_ROUNDS = 20
"""The second round usually copies what changed during a long first one, and the third finds nothing to do."""

Mark = tuple[int, int]
"""Inode and modification time of a file or folder: a new one of the same name has another mark."""


IN_BUCKET: Mark = (0, 0)
"""The mark of what is not in the data folder: in a bucket no name is written twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    folder: Path
    things: int
    """How many checkpoints, snapshots and payloads were copied beside the database."""
    size_bytes: int


def back_up(store: Store, data_dir: Path, target: Path, extra: tuple[str, ...] = ()) -> Backup:
    """Copy all data into `target`, a new folder that a server can be started on.

    `extra` names more files of the data folder to copy, if they exist.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValidationError(f"{target} exists already. Name a folder that does not exist.")
    unfinished = target.with_name(target.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True, mode=0o700)
        copied = _copy_all(store, data_dir, unfinished)
        for name in extra:
            if (data_dir / name).is_file():
                shutil.copyfile(data_dir / name, unfinished / name)
        size = _make_private(unfinished)
        if target.exists():
            target.rmdir()  # it is empty
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Backup(folder=target, things=len(copied), size_bytes=size)


def _copy_all(store: Store, data_dir: Path, folder: Path) -> dict[str, Mark]:
    """Copy the database and everything it refers to into `folder`, and return the mark of each copied item."""
    copied: dict[str, Mark] = {}

    def mark_of(name: str) -> Mark | None:
        return _mark(data_dir / name) or (IN_BUCKET if store.folders.is_shared else None)

    for _ in range(MAX_ROUNDS):
        (folder / DATABASE).unlink(missing_ok=True)
        store.backup(folder / DATABASE)
        referenced = _referenced(folder)
        for name in copied.keys() - referenced:
            _remove(folder / name)
            del copied[name]
        missing = {name for name in referenced if name not in copied or copied[name] != mark_of(name)}
        if not missing:
            return copied
        for name in sorted(missing):
            mark = mark_of(name)
            _remove(folder / name)
            copied.pop(name, None)
            is_fetched = mark == IN_BUCKET
            if mark is not None and (
                _fetch(store, name, folder / name) if is_fetched else _copy(data_dir / name, folder / name)
            ):
                copied[name] = mark
    raise TinkexError(
        f"The service changes faster than it can be copied ({MAX_ROUNDS} attempts, {len(missing)} files missing). "
        "Try again when it is less busy, or stop it first. If nothing runs, its files are damaged."
    )


def _make_private(folder: Path) -> int:
    """Let only the owner read a folder and all in it, whatever the umask, and return the size of its files.

    SQLite gives the files that a server will write beside the database its permissions.
    """
    size = 0
    for path in (folder, *folder.rglob("*")):
        is_folder = path.is_dir()
        path.chmod(0o700 if is_folder else 0o600)
        size += 0 if is_folder else path.stat().st_size
    return size


def _referenced(folder: Path) -> set[str]:
    """Return everything that the copied database refers to, relative to the data folder."""
    with Store.open(f"sqlite:///{folder / DATABASE}", folder) as copy:
        return copy.all_files()


def _mark(path: Path) -> Mark | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _copy(source: Path, target: Path) -> bool:
    """Copy a file or folder. Returns False if it was deleted meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
    except (FileNotFoundError, shutil.Error) as error:
        # copytree collects all failures; only a file that was deleted meanwhile is expected.
        failures = error.args[0] if isinstance(error, shutil.Error) else []
        if any("No such file" not in str(reason) for *_, reason in failures):
            raise
        _remove(target)
        return False
    return True


def _fetch(store: Store, name: str, target: Path) -> bool:
    """Fetch a folder or a payload from the bucket. Returns False if it was deleted meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        if in_bucket(target.name) is not None:
            target.write_bytes(store.read_payload(StoredPayload(None, target.name)))
        else:
            target.mkdir(mode=0o700)
            store.folders.fetch(name, target)
    except FileNotFoundError:
        _remove(target)
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
