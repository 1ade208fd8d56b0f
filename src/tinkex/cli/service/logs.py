"""`tinkex logs`: shows the log of a service that runs, or ran, in the background."""

from __future__ import annotations

import argparse
import sys

from tinkex.cli.arguments import count
from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import add_flags, config_of
from tinkex.clock import REAL
from tinkex.errors import TinkexError
from tinkex.home.lock import holder_pid
from tinkex.home.running import LOG_FILE, running_service

LOOK_S = 0.2
LINES = 100
MORE = """\
A service that `tinkex serve` runs in a terminal logs there, and has no file. The log of the service
before the last start is beside it, in service.log.1."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command("logs", logs, about, "tinkex logs", "tinkex logs --follow", more=MORE, is_local=True)
    command.add_argument(
        "-n", "--lines", type=count, default=LINES, metavar="N", help=f"last N lines (default {LINES})"
    )
    command.add_argument("--follow", action="store_true", help="go on with what is added, until the service ends")
    add_flags(command.add_argument_group("the service's data"), ["data_dir"])


def logs(args: argparse.Namespace) -> None:
    folder = config_of(args).data_dir
    service = running_service(folder)
    if service is not None and service.log is None:
        raise TinkexError(f"The service (pid {service.pid}) logs to the terminal that it was started in.")
    try:
        log = (folder / LOG_FILE).open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise TinkexError(
            f"{folder} has no log. `tinkex serve --background` and tinkex.local() start a service that writes one."
        ) from None
    with log:
        lines = log.readlines()
        sys.stdout.write("".join(lines[max(len(lines) - args.lines, 0) :]))
        sys.stdout.flush()
        while args.follow:
            is_running = holder_pid(folder) is not None
            sys.stdout.write(log.read())
            sys.stdout.flush()
            if not is_running:
                return
            REAL.pause(LOOK_S)
