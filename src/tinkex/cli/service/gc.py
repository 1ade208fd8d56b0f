"""`tinkex gc`: frees the space of what a service needs no more. A running server does the same by and by."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinkex.cli.service.data_folder import PLACE, add_flags, config_of, open_store
from tinkex.terminal import output
from tinkex.terminal.format import size
from tinkex.terminal.output import Column

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from tinkex.cli.main import Words
    from tinkex.settings import ServeConfig
    from tinkex.store.store import Store

COLUMNS = (Column("WHAT"), Column("WHY"), Column("SIZE", is_number=True))
MORE = """\
Removes checkpoints that have expired, results that are older than --result-ttl-s, and folders that
nothing refers to (a crash leaves some). While a server runs, such folders must be an hour old, for
they may still be in the making. Nothing that a client can still ask for is touched."""


class Rubbish(NamedTuple):
    what: str
    why: str
    size_bytes: int
    folder: str
    path: str | None = None
    """Of an expired checkpoint, its tinker:// path."""


def add(words: Words, about: str) -> None:
    made = words.add("gc", gc, about, "tinkex gc --dry-run", "tinkex gc", more=MORE, is_local=True)
    made.add_argument("--dry-run", action="store_true", help="only say what would go")
    add_flags(made.add_argument_group("the service's data"), (*PLACE, "result_ttl_s"))


def gc(args: argparse.Namespace) -> int:
    config = config_of(args)
    files = 0
    with open_store(config) as store:
        from tinkex.errors import ConfigError
        from tinkex.store.lock import DataLock

        lock = DataLock(config.data_dir)
        try:
            lock.acquire()
            is_alone = True
        except ConfigError:  # a server has it
            is_alone = False
        try:
            found = [*_expired(store, config), *_unnamed(store, config, is_alone=is_alone)]
            if not args.dry_run:
                _remove(store, config, found)
                files = store.sweep() if is_alone else 0
        finally:
            lock.release()
    freed = sum(entry.size_bytes for entry in found)
    if args.output == "json":
        entries = [{"what": entry.what, "why": entry.why, "size_bytes": entry.size_bytes} for entry in found]
        output.write_json({"removed": entries, "size_bytes": freed, "is_dry_run": args.dry_run, "files": files})
        return 0
    if found:
        output.write_table(COLUMNS, [(entry.what, entry.why, size(entry.size_bytes)) for entry in found])
    also = f", and {files} files of the journal" if files else ""
    output.remark(f"{'Would free' if args.dry_run else 'Freed'} {size(freed)} in {len(found)} places{also}.")
    return 0


def _expired(store: Store, config: ServeConfig) -> list[Rubbish]:
    from tinkex.clock import REAL

    return [
        Rubbish(saved.path, "expired", saved.size_bytes, saved.folder, saved.path)
        for saved in store.expired_checkpoints(REAL.wall())
    ]


def _unnamed(store: Store, config: ServeConfig, *, is_alone: bool) -> list[Rubbish]:
    from tinkex.clock import REAL
    from tinkex.server.upkeep import folders
    from tinkex.server.upkeep.janitor import ROOTS, RUBBISH_AGE_S, unnamed

    root = config.data_dir.resolve()
    named = {folders.inside(root, folder) for folder in store.all_folders()}
    old = REAL.wall() - (0.0 if is_alone else RUBBISH_AGE_S)
    return [
        Rubbish(str(folder.relative_to(root)), "nothing refers to it", _size(folder), str(folder.relative_to(root)))
        for folder in unnamed([root / name for name in ROOTS], named, old)
    ]


def _remove(store: Store, config: ServeConfig, found: list[Rubbish]) -> None:
    from tinkex.clock import REAL
    from tinkex.server.upkeep import folders

    for entry in found:
        # The row first: a crash in between leaves a folder that nothing refers to, and the next run finds it.
        if entry.path is None or store.delete_checkpoint(entry.path, expired_by=REAL.wall()) is not None:
            folders.remove(config.data_dir, entry.folder)
    store.expire_results(REAL.wall() - config.result_ttl_s)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
