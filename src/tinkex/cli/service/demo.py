"""`tinkex demo`: watch a small model learn something on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.arguments import count
from tinkex.terminal import output

if TYPE_CHECKING:
    import argparse

    from tinkex.cli.main import Words
    from tinkex.demo.stage import Stage

MODEL = "smollm2-135m"
MORE = """\
A private service is started, a model of 135 million parameters is examined, trained and examined
again, and the adapter is saved. It takes a few minutes on two cores, without a GPU; the first time
the model is fetched. With --rl nobody shows it what is right: it tries, and is given points.
Stopped with Ctrl-C, it goes on when run again."""


def add(words: Words, about: str) -> None:
    made = words.add(
        "demo", demo, about, "tinkex demo", "tinkex demo --rl", "tinkex demo --console", more=MORE, is_local=True
    )
    made.add_argument("--rl", action="store_true", help="learn by trial and error instead of from examples")
    made.add_argument("--console", action="store_true", help="train nothing: open the console of what was trained here")
    made.add_argument("--fresh", action="store_true", help="begin anew, even if a demo was stopped half-way")
    made.add_argument("--steps", type=count, metavar="N", help="how many steps to train")
    made.add_argument("--seed", type=count, default=0, metavar="N", help="another seed, another course (default 0)")
    made.add_argument("--model", metavar="NAME", default=MODEL, help=f"the base model (default {MODEL})")
    made.add_argument(
        "--folder", metavar="FOLDER", type=Path, help="where data and adapter go (default: in the user's data folder)"
    )
    made.add_argument("--no-browser", action="store_true", help="with --console: print the address only")


def demo(args: argparse.Namespace) -> int:
    from tinkex.local_service import needs_local

    needs_local("tinkex demo")
    from tinkex import settings
    from tinkex.demo import reinforced, supervised
    from tinkex.demo.stage import Stage

    task = reinforced if args.rl else supervised
    name = "demo-rl" if args.rl else "demo"
    folder = args.folder.expanduser().absolute() if args.folder else settings.resolve_serve().data_dir / name
    command = " ".join(
        ["tinkex demo", *(["--rl"] if args.rl else []), *([f"--folder {folder}"] if args.folder else [])]
    )
    steps = args.steps or task.STEPS
    stage = Stage(folder, args.model, args.seed, steps, is_fresh=args.fresh, command=command)
    if args.console:
        return _console(stage, opens=not args.no_browser)
    try:
        task.run(stage)
    except KeyboardInterrupt:
        output.remark("\nPaused. Run the same command again, and it goes on where it was.")
        return 130
    return 0


def _console(stage: Stage, opens: bool) -> int:
    from tinkex.cli.commands.console import open_with_key
    from tinkex.demo.stage import SERVICE, pause, say
    from tinkex.errors import TinkexError
    from tinkex.local_service import KEY_FILE

    key_file = stage.folder / SERVICE / KEY_FILE
    if not key_file.is_file():
        raise TinkexError(f"There is no demo in {stage.folder} yet. Run `{stage.command}` first.")
    with stage.service() as service:
        say(f"The demo's service is at {service.base_url}; Ctrl-C ends it. To use it from another terminal:")
        say(f"  export TINKER_BASE_URL={service.base_url}")
        say(f"  export TINKER_API_KEY=$(cat '{key_file}')")
        say("  tinkex console        also: tinkex run list, tinkex chat, tinkex checkpoint list")
        if opens and not open_with_key(f"{service.base_url}/", service.api_key):
            output.remark("No browser could be started here. Open the address yourself; the page asks for the key.")
        try:
            while True:
                pause(3600)
        except KeyboardInterrupt:
            say("\nThe demo's service has ended.")
    return 0
