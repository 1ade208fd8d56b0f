"""`tinkex ps`: shows the service that runs on a data folder, and how many programs use it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import add_flags, config_of
from tinkex.clock import REAL
from tinkex.home.lock import holder_pid
from tinkex.home.running import running_service
from tinkex.home.users import user_pids
from tinkex.terminal import output
from tinkex.terminal.format import duration

MORE = """\
The service of `tinkex serve`, or the one that tinkex.local() started: that ends by itself some
seconds after its last user has left. A service on another folder is shown with --data-dir."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command("ps", ps, about, "tinkex ps", "tinkex ps -o json", more=MORE, is_local=True)
    add_flags(command.add_argument_group("the service's data"), ["data_dir"])


def ps(args: argparse.Namespace) -> None:
    folder = config_of(args).data_dir
    service, users = running_service(folder), user_pids(folder)
    if args.output == "json":
        about = [] if service is None else [{**asdict(service), "data_dir": str(folder), "users": users}]
        output.write_json({"services": about})
    elif service is not None:
        up = duration(max(REAL.wall() - service.started_at, 0.0))
        ends = "when unused" if service.ends_unused else "when stopped"
        row = (service.url, str(service.pid), ", ".join(service.models), str(len(users)), up, ends, service.version)
        output.write_table(("ADDRESS", "PID", "MODELS", "USERS", "UP", "ENDS", "VERSION"), [row], numbers=["USERS"])
        output.remark(f"Data: {folder}")
    elif pid := holder_pid(folder):
        output.remark(f"A service on {folder} is starting or stopping (pid {pid}). `tinkex logs` shows what it does.")
    else:
        output.remark(f"No service runs on {folder}. `tinkex serve --background` starts one.")
