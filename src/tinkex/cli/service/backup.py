"""`tinkex backup`: copies all data of a service into a folder that a server can be started on."""

from __future__ import annotations

import argparse
from pathlib import Path

from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import LOCATION, add_flags, config_of, open_store
from tinkex.terminal import output
from tinkex.terminal.format import size

MORE = """\
The copy is consistent even while the service is running: database, checkpoints and journal are
copied as of one moment, for their owner only. To restore it, copy FOLDER and start `tinkex serve
--data-dir COPY`: a service writes to the folder that it is started on. Keys that were revoked after
the backup are live again in it. With --blobs, the files are fetched from the bucket, so that the
copy is whole without it. A PostgreSQL database is backed up with its own tools, and a bucket that
belongs to it too: the database first, the bucket after it, before the service deletes what the
database names (or with versions of the bucket)."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "backup", backup, about, "tinkex backup /mnt/backups/tinkex-monday", "tinkex backup copy --data-dir ./data",
        more=MORE, is_local=True,
    )  # fmt: skip
    command.add_argument("folder", metavar="FOLDER", help="where to write the copy; must not exist")
    add_flags(command.add_argument_group("the service's data"), (*LOCATION, "blobs"))


def backup(args: argparse.Namespace) -> None:
    config = config_of(args)
    with open_store(config) as store:
        from tinkex.home.owner_key import KEY_FILE
        from tinkex.store.backup import back_up

        target = Path(args.folder).expanduser().absolute()
        copy = back_up(store, config.data_dir, target, extra=(KEY_FILE,))
    if args.output == "json":
        output.write_json({"folder": str(copy.folder), "things": copy.things, "size_bytes": copy.size_bytes})
    else:
        print(f"{copy.folder}: the database and {copy.things} files and folders, {size(copy.size_bytes)}.")
        output.remark("To restore it, copy it (a service writes to its folder): tinkex serve --data-dir COPY")
