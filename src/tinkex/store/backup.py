"""A copy of all that a service keeps, taken while it runs.

The database alone is copied at one moment; folders and files beside it come and go meanwhile. They are never written
again once a row names them, and go only after no row does. So: copy the database, copy what it names, and again, until
a copy of the database names only what was copied before it and has not changed since. Each of these was there, whole,
both before and after it was copied.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from tinkex.errors import TinkexError, ValidationError
from tinkex.store.rows import payloads
from tinkex.store.store import Store

DATABASE = "tinkex.db"
MAX_ROUNDS = 20
"""The second usually finds what changed during a long first one, the third nothing."""

Mark = tuple[int, int]
"""Which file or folder it is, and when it was made: a new one of the same name has another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    folder: Path
    things: int
    """Checkpoints, snapshots and payloads beside the database."""
    size_bytes: int


def back_up(store: Store, data_dir: Path, target: Path, extra: tuple[str, ...] = ()) -> Backup:
    """Copy everything into `target`, a new folder that a server can be started on. `extra`: files to take if there."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValidationError(f"{target} is already there. Name a folder that does not exist.")
    unfinished = target.with_name(target.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True, mode=0o700)
        held = _gather(store, data_dir, unfinished)
        for name in extra:
            if (data_dir / name).is_file():
                shutil.copyfile(data_dir / name, unfinished / name)
                (unfinished / name).chmod(0o600)
        size = sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file())
        if target.exists():
            target.rmdir()  # it is empty
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Backup(folder=target, things=len(held), size_bytes=size)


def _gather(store: Store, data_dir: Path, place: Path) -> dict[str, Mark]:
    held: dict[str, Mark] = {}
    for _ in range(MAX_ROUNDS):
        (place / DATABASE).unlink(missing_ok=True)
        store.backup(place / DATABASE)
        named = _named(place)
        for name in held.keys() - named:
            _remove(place / name)
            del held[name]
        wanted = {name for name in named if name not in held or held[name] != _mark(data_dir / name)}
        if not wanted:
            return held
        for name in sorted(wanted):
            mark = _mark(data_dir / name)
            _remove(place / name)
            held.pop(name, None)
            if mark is not None and _copy(data_dir / name, place / name):
                held[name] = mark
    raise TinkexError(
        f"The service changes faster than it can be copied ({MAX_ROUNDS} attempts, {len(wanted)} files still missing). "
        "Try again when it is less busy, or stop it first. If nothing runs, its files are damaged."
    )


def _named(place: Path) -> set[str]:
    """Everything that a copy of the database refers to, relative to the data folder."""
    with Store.open(f"sqlite:///{place / DATABASE}", place) as copy:
        folders = copy.all_folders()
        with copy._read() as connection:
            files = [name for name in connection.scalars(select(payloads.c.file)) if name is not None]
    return {*folders, *(f"journal/{name[:2]}/{name}" for name in files)}


def _mark(path: Path) -> Mark | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _copy(source: Path, target: Path) -> bool:
    """False if it went away meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
    except (FileNotFoundError, shutil.Error) as problem:
        # copytree gathers what failed; anything but a file that is gone is worth knowing.
        failures = problem.args[0] if isinstance(problem, shutil.Error) else []
        if any("No such file" not in str(reason) for *_, reason in failures):
            raise
        _remove(target)
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
