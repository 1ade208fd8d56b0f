"""`tinkex demo`: trains a small model on this machine and shows what it has learned."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.arguments import count
from tinkex.cli.parser import CommandParser
from tinkex.clock import REAL
from tinkex.errors import TinkexError
from tinkex.home.owner_key import KEY_FILE
from tinkex.terminal import output

if TYPE_CHECKING:
    from tinkex.demo.stage import Stage

MODEL = "smollm2-135m"
SERVICE = "service"
"""With --folder: the data folder in it."""
MORE = """\
Tests a model with 135 million parameters, trains it, tests it again and saves the adapter, on the
service of this machine, which is started if none runs. It takes a few minutes on two cores, without
a GPU; the first time, the model is downloaded. By default the model learns from examples; with --rl
it learns from rewards for its own attempts. After Ctrl-C, run the same command again to continue."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "demo", demo, about, "tinkex demo", "tinkex demo --rl", "tinkex demo --console", more=MORE, is_local=True
    )
    command.add_argument(
        "--rl", action="store_true", help="reinforcement learning: learn from rewards instead of examples"
    )
    command.add_argument("--console", action="store_true", help="do not train: open the console of the demo's service")
    command.add_argument(
        "--fresh", action="store_true", help="start from the beginning, even if an earlier demo was interrupted"
    )
    command.add_argument("--steps", type=count, metavar="N", help="number of training steps")
    command.add_argument("--seed", type=count, default=0, metavar="N", help="random seed (default 0)")
    command.add_argument("--model", metavar="NAME", default=MODEL, help=f"the base model (default {MODEL})")
    command.add_argument(
        "--folder",
        metavar="FOLDER",
        type=Path,
        help="where to store run and adapter (default: the data folder that all commands share)",
    )
    command.add_argument("--no-browser", action="store_true", help="with --console: only print the address")


def demo(args: argparse.Namespace) -> int:
    from tinkex.local_service import needs_local

    needs_local("tinkex demo")
    from tinkex import settings
    from tinkex.demo import reinforced, supervised
    from tinkex.demo.stage import Stage

    task = reinforced if args.rl else supervised
    name, command = ("demo-rl", "tinkex demo --rl") if args.rl else ("demo", "tinkex demo")
    if args.folder:
        folder = args.folder.expanduser().absolute()
        data_dir = folder / SERVICE
        command += f" --folder {folder}"
    else:
        folder, data_dir = settings.home() / name, None
    steps = args.steps or task.STEPS
    stage = Stage(folder, args.model, args.seed, steps, data_dir=data_dir, is_fresh=args.fresh, command=command)
    if args.console:
        return _console(stage, opens=not args.no_browser)
    try:
        task.run(stage)
    except KeyboardInterrupt:
        output.remark("\nPaused. Run the same command again to continue.")
        return 130
    return 0


def _console(stage: Stage, opens: bool) -> int:
    from tinkex import settings
    from tinkex.cli.commands.console import open_with_key
    from tinkex.demo.stage import say

    if not (stage.data_dir or settings.home()).joinpath("tinkex.db").is_file():
        raise TinkexError(f"There is no demo yet. Run `{stage.command}` first.")
    with stage.service() as service:
        say(f"The console is at {service.base_url}/ until Ctrl-C. From another terminal:")
        if stage.data_dir is not None:
            say(f"  export TINKER_BASE_URL={service.base_url}")
            say(f"  export TINKER_API_KEY=$(cat '{stage.data_dir / KEY_FILE}')")
        say("  tinkex console        also: tinkex run list, tinkex chat latest, tinkex checkpoint list")
        if opens and not open_with_key(f"{service.base_url}/", service.api_key):
            output.remark("No browser could be started. Open the address yourself; the page asks for the key.")
        try:
            while True:
                REAL.pause(3600)
        except KeyboardInterrupt:
            say("\nLeft the service; it ends by itself if nothing else uses it.")
    return 0
