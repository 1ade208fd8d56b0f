"""`tinkex gc`: deletes files that a service no longer needs. A running server does the same from time to time."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import LOCATION, add_flags, config_of, folder_size, open_store
from tinkex.clock import REAL
from tinkex.errors import ConfigError
from tinkex.settings import ServeConfig
from tinkex.terminal import output
from tinkex.terminal.format import plural, size

if TYPE_CHECKING:
    from tinkex.store.store import Store

MORE = """\
Deletes checkpoints that have expired, results older than --result-ttl-s, and folders that nothing
refers to (a crash leaves some). While a server is running, only folders older than an hour are
deleted: newer ones may be unfinished. Nothing that a client can still request is deleted."""


MIN_BUCKET_AGE_S = 3600.0
"""What is younger in a bucket may be waiting for its row."""


class UnusedFolder(NamedTuple):
    folder: str
    why: str
    size_bytes: int
    path: str | None = None
    """The tinker:// path of an expired checkpoint."""

    @property
    def what(self) -> str:
        return self.path or self.folder


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command("gc", gc, about, "tinkex gc --dry-run", "tinkex gc", more=MORE, is_local=True)
    command.add_argument("--dry-run", action="store_true", help="only show what would be deleted")
    add_flags(command.add_argument_group("the service's data"), (*LOCATION, "blobs", "result_ttl_s"))


def gc(args: argparse.Namespace) -> None:
    config = config_of(args)
    files = 0
    with open_store(config) as store:
        from tinkex.home.lock import FileLock

        lock = FileLock(config.data_dir)
        try:
            lock.acquire()
            is_alone = True
        except ConfigError:  # a server is running
            is_alone = False
        try:
            unused = [*_expired(store), *_unnamed(store, config, is_alone=is_alone)]
            if not args.dry_run:
                _remove(store, config, unused)
                files = store.sweep() if is_alone else 0
            # Another server may write to the bucket, whatever runs here.
            before = REAL.wall() - MIN_BUCKET_AGE_S
            lost = store.remove_orphans(store.referenced(), before, is_dry_run=args.dry_run)
            unused += [UnusedFolder(name, "nothing refers to it", nbytes) for name, nbytes in lost.folders.items()]
            files += lost.files
        finally:
            lock.release()
    freed = sum(entry.size_bytes for entry in unused)
    if args.output == "json":
        entries = [{"what": entry.what, "why": entry.why, "size_bytes": entry.size_bytes} for entry in unused]
        output.write_json({"removed": entries, "size_bytes": freed, "is_dry_run": args.dry_run, "files": files})
        return
    if unused:
        rows = [(entry.what, entry.why, size(entry.size_bytes)) for entry in unused]
        output.write_table(("WHAT", "WHY", "SIZE"), rows, numbers=["SIZE"])
    also = f" and {plural(files, 'file')} of the journal" if files else ""
    deleted = "Would delete" if args.dry_run else "Deleted"
    output.remark(f"{deleted} {plural(len(unused), 'folder')}{also}, {size(freed)}.")


def _expired(store: Store) -> list[UnusedFolder]:
    return [
        UnusedFolder(saved.folder, "expired", saved.size_bytes, saved.path)
        for saved in store.expired_checkpoints(REAL.wall())
    ]


def _unnamed(store: Store, config: ServeConfig, *, is_alone: bool) -> list[UnusedFolder]:
    from tinkex.server.upkeep.janitor import MIN_ORPHAN_AGE_S, SWEPT_FOLDERS, unreferenced_folders

    root = config.data_dir.resolve()
    named = {store.folders.resolve(folder) for folder in store.all_folders()}
    old = REAL.wall() - (0.0 if is_alone else MIN_ORPHAN_AGE_S)
    return [
        UnusedFolder(str(folder.relative_to(root)), "nothing refers to it", folder_size(folder))
        for folder in unreferenced_folders([root / name for name in SWEPT_FOLDERS], named, old)
    ]


def _remove(store: Store, config: ServeConfig, unused: list[UnusedFolder]) -> None:
    for entry in unused:
        # The row first: a crash in between leaves a folder that nothing refers to, and the next run deletes it.
        if entry.path is None or store.delete_checkpoint(entry.path, expired_by=REAL.wall()) is not None:
            store.folders.remove(entry.folder)
    store.expire_results(REAL.wall() - config.result_ttl_s)
