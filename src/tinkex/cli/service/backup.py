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
copied as of one moment. To restore it, start `tinkex serve --data-dir FOLDER`. Back up a PostgreSQL
database with its own tools."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "backup", backup, about, "tinkex backup /mnt/backups/tinkex-monday", "tinkex backup copy --data-dir ./data",
        more=MORE, is_local=True,
    )  # fmt: skip
    command.add_argument("folder", metavar="FOLDER", help="where to write the copy; must not exist")
    add_flags(command.add_argument_group("the service's data"), LOCATION)


def backup(args: argparse.Namespace) -> None:
    config = config_of(args)
    with open_store(config) as store:
        from tinkex.local_service import KEY_FILE
        from tinkex.store.backup import back_up

        target = Path(args.folder).expanduser().absolute()
        copy = back_up(store, config.data_dir, target, extra=(KEY_FILE,))
    if args.output == "json":
        output.write_json({"folder": str(copy.folder), "things": copy.things, "size_bytes": copy.size_bytes})
    else:
        print(f"{copy.folder}: the database and {copy.things} files and folders, {size(copy.size_bytes)}.")
        output.remark(f"To restore it: tinkex serve --data-dir {copy.folder}")
