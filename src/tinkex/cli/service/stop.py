"""`tinkex stop`: stops the service that runs on a data folder, in order."""

from __future__ import annotations

import argparse
import os
import signal

from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import add_flags, config_of
from tinkex.clock import REAL
from tinkex.errors import TinkexError
from tinkex.home.lock import holder_pid
from tinkex.home.users import user_pids
from tinkex.terminal import output
from tinkex.terminal.format import plural

LOOK_S, LINE_S = 0.05, 5.0
BEYOND_DRAIN_S = 30.0
"""How long a service may take to end after the time for its running work."""
MORE = """\
The service finishes the work in progress; what is queued continues when a service is started on the
same folder again. Nothing is deleted."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command("stop", stop, about, "tinkex stop", "tinkex stop --force", more=MORE, is_local=True)
    command.add_argument("--force", action="store_true", help="stop it even if programs are using it")
    add_flags(command.add_argument_group("the service's data"), ["data_dir", "drain_s"])


def stop(args: argparse.Namespace) -> None:
    config = config_of(args)
    pid, users = holder_pid(config.data_dir), user_pids(config.data_dir)
    if not pid:
        output.remark(f"No service runs on {config.data_dir}.")
        return
    if users and not args.force:
        raise TinkexError(
            f"The service is in use by {plural(len(users), 'program')} (pid {', '.join(map(str, users))}). End that "
            "first, or stop the service under it: `tinkex stop --force`."
        )
    try:
        os.kill(pid, signal.SIGTERM)
    except OSError as error:
        raise TinkexError(f"The service (pid {pid}) cannot be stopped: {error.strerror}.") from None
    began = said = REAL.now()
    while holder_pid(config.data_dir) == pid:
        now = REAL.now()
        if now - began > config.drain_s + BEYOND_DRAIN_S:
            raise TinkexError(f"The service has not ended after {now - began:.0f} s. To end it now: kill -9 {pid}")
        if now - said > LINE_S:
            said = now
            output.remark(f"The service finishes its work in progress ({now - began:.0f} s) …")
        REAL.pause(LOOK_S)
    if args.output == "json":
        output.write_json({"pid": pid, "data_dir": str(config.data_dir)})
    else:
        print(f"Stopped the service (pid {pid}). Its data stays in {config.data_dir}.")
