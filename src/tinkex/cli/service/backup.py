"""`tinkex backup`: all that a service keeps, in a folder of its own that a server can be started on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.cli.service.data_folder import PLACE, add_flags, config_of, open_store
from tinkex.terminal import output
from tinkex.terminal.format import size

if TYPE_CHECKING:
    import argparse

    from tinkex.cli.main import Words

MORE = """\
The copy is consistent although the service goes on working: database, checkpoints and journal fit
together as of one moment. To go back to it, start `tinkex serve --data-dir FOLDER`. A PostgreSQL
database is backed up with its own tools."""


def add(words: Words, about: str) -> None:
    made = words.add(
        "backup", backup, about, "tinkex backup /mnt/backups/tinkex-monday", "tinkex backup copy --data-dir ./data",
        more=MORE, is_local=True,
    )  # fmt: skip
    made.add_argument("folder", metavar="FOLDER", help="where to write; must not exist")
    add_flags(made.add_argument_group("the service's data"), PLACE)


def backup(args: argparse.Namespace) -> int:
    from pathlib import Path

    config = config_of(args)
    with open_store(config) as store:
        from tinkex.local_service import KEY_FILE
        from tinkex.store.backup import back_up

        target = Path(args.folder).expanduser().absolute()
        made = back_up(store, config.data_dir, target, extra=(KEY_FILE,))
    if args.output == "json":
        output.write_json({"folder": str(made.folder), "things": made.things, "size_bytes": made.size_bytes})
    else:
        print(f"{made.folder}: the database and {made.things} things it names, {size(made.size_bytes)}.")
        output.remark(f"To go back to it: tinkex serve --data-dir {made.folder}")
    return 0
