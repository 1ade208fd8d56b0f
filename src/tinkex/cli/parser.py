"""The commands of `tinkex` and their arguments: the table of commands, and the parsers that are built from it.

A command's module is loaded only when its name is on the command line, so that `tinkex --help` stays fast.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from tinkex._version import PROTOCOL_VERSION, __version__

ABOUT = "Fine-tune language models through the Tinker API, on your own service or on the hosted one."
EXAMPLES = """\
first steps:
  tinkex demo                  train a small model on this machine and watch it learn
  tinkex serve                 run a service on this machine, at http://127.0.0.1:8642
  tinkex console               see its runs and checkpoints in the browser
  tinkex chat                  chat with a base model or with an adapter you trained
  tinkex doctor                diagnose the settings and the connection to the service

All of them use the service of `tinkex serve` or tinkex.local() that runs on this machine, unless
TINKER_BASE_URL and TINKER_API_KEY name another. `tinkex COMMAND --help` shows a command's options.
"""


COMMANDS = {
    "demo": ("service", "train a small model on this machine and watch it learn"),
    "serve": ("service", "run a service on this machine"),
    "ps": ("service", "show the service that runs on this machine"),
    "stop": ("service", "stop the service on this machine"),
    "logs": ("service", "show the log of a service in the background"),
    "console": ("commands", "open your service's web console"),
    "chat": ("commands", "chat with a base model or with an adapter you trained"),
    "sample": ("commands", "generate text from a prompt"),
    "models": ("commands", "list, download and offer base models"),
    "run": ("commands", "list training runs and watch them"),
    "checkpoint": ("commands", "manage saved weights"),
    "export": ("commands", "convert a checkpoint into files for other programs"),
    "doctor": ("commands", "diagnose the settings and the connection to the service"),
    "key": ("service", "manage API keys"),
    "backup": ("service", "back up a service's data"),
    "gc": ("service", "delete unused files"),
    "cluster": ("service", "start, show, drain and stop the servers that share a database"),
    "completion": ("commands", "print a shell completion script"),
}
"""Command → the folder of its module, which has a function `add(parser, about)`, and what the command does."""
MISUSED = 2
DEFAULTS = {"output": "table", "base_url": None, "api_key": None, "debug": False}
Run = Callable[[argparse.Namespace], int | None]
"""Runs a command; returns its exit code, or None for success."""
_INVALID_CHOICE = re.compile(
    r"argument COMMAND: invalid choice: '(?P<word>.*)' \(choose from (?P<choices>.*)\)", re.DOTALL
)
CLOSE = 0.6
"""How alike a misspelt word and the one that was meant are (difflib's own measure and default)."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. A wrong one ends the program with what was probably meant."""
    parser = build_parser(argv)
    args, unknown = parser.parse_known_args(argv)
    used = getattr(args, "used_parser", parser)
    if unknown:
        used.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown[0], used.options)}")
    for name, value in DEFAULTS.items():
        vars(args).setdefault(name, value)
    return args


def build_parser(argv: Sequence[str]) -> _Parser:
    """Return the parser for a command line. Only the commands named in `argv` get their arguments.

    The shared options may come before or after the command.
    """
    # No default values: a default of the inner parser would overwrite an option that came before the command.
    local = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    group = local.add_argument_group("common options")
    group.add_argument(
        "-o", "--output", "-f", "--format", dest="output", choices=("table", "json"),
        help="table for people (default), json for programs",
    )  # fmt: skip
    group.add_argument("--debug", action="store_true", help="log everything, and show tracebacks")
    shared = _Parser(add_help=False, argument_default=argparse.SUPPRESS, parents=[local])
    group = shared.add_argument_group("the service")
    group.add_argument("--base-url", metavar="URL", help="address of the service (default: TINKER_BASE_URL)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="discouraged: other users of this machine can read command lines. Set TINKER_API_KEY instead",
    )
    top = _Parser("tinkex", description=ABOUT, epilog=EXAMPLES, parents=[shared])
    top.add_argument("--version", action="version", version=f"tinkex {__version__}")
    commands = CommandParser(top, "tinkex", shared, local)
    for name, (folder, about) in COMMANDS.items():
        if name in argv:
            import_module(f"tinkex.cli.{folder}.{name}").add(commands, about)
        else:  # listed by name only: its module is not loaded
            commands.add_command(name, None, about)
    commands.add_command("version", show_version, "show the version", "tinkex version -o json")
    return top


class CommandParser:
    """Adds commands that all have the shared options, a description and an example.

    A local command uses no service, so it has only the output options.
    """

    def __init__(
        self, parent: _Parser, prog: str, shared: _Parser, local: _Parser, *, is_required: bool = True
    ) -> None:
        # `prog` is passed because argparse would otherwise load its formatter to find it out.
        self._commands = parent.add_subparsers(title="commands", metavar="COMMAND", required=is_required, prog=prog)
        self._prog = prog
        self._shared = shared
        self._local = local

    def add_command(
        self, name: str, run: Run | None, about: str, *examples: str, more: str = "", hint: str = "",
        is_local: bool = False,
    ) -> _Parser:  # fmt: skip
        """Add a command that calls `run(args)`. `hint` is shown when the command is used wrongly."""
        command = self._commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}." + (f"\n\n{more}" if more else ""),
            epilog="\n  ".join(("examples:" if len(examples) > 1 else "example:", *examples)),
            parents=[self._local if is_local else self._shared],
        )
        command.hint = hint
        command.set_defaults(used_parser=command)
        if run is not None:
            command.set_defaults(run=run)
        return command

    def add_group(self, name: str, about: str, *examples: str, more: str = "", is_local: bool = False) -> CommandParser:
        """Add a command that has commands of its own. Used alone it shows its help."""

        def show_help(args: argparse.Namespace) -> int:
            group.print_help(sys.stderr)
            return MISUSED

        group = self.add_command(name, show_help, about, *examples, more=more, is_local=is_local)
        shared = self._local if is_local else self._shared
        return CommandParser(group, f"{self._prog} {name}", shared, self._local, is_required=False)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal. argparse creates one for every option, and would load `shutil` for the width."""

    def __init__(self, prog: str) -> None:
        try:
            width = os.get_terminal_size(sys.__stdout__.fileno()).columns - 2  # type: ignore[union-attr]
        except (OSError, ValueError, AttributeError):
            width = 98
        super().__init__(prog, width=max(width, 40))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors show what to do next: the examples, instead of argparse's list of all options."""

    hint = ""

    def __init__(self, prog: str | None = None, **options: object) -> None:
        super().__init__(prog, formatter_class=_Formatter, allow_abbrev=False, **options)  # type: ignore[arg-type]

    @property
    def options(self) -> list[str]:
        """Return the options that people may write."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [option for action in shown for option in action.option_strings]

    def error(self, message: str) -> NoReturn:
        if wrong := _INVALID_CHOICE.fullmatch(message):
            choices = re.findall(r"[\w-]+", wrong["choices"])
            message = f"there is no command {wrong['word']!r}{_meant(wrong['word'], choices)}"
        lines = [f"{self.prog}: {message}", *([self.hint] if self.hint else []), "", (self.epilog or "").rstrip()]
        self.exit(MISUSED, "\n".join([*lines, f"\n`{self.prog} --help` shows all options.\n"]))


def _meant(word: str, known: Sequence[str]) -> str:
    """Return a question about the known word that is most like a wrong one; "" if none is like it."""
    from difflib import get_close_matches  # on an error only: `--help` must be fast

    close = get_close_matches(word.partition("=")[0], known, n=1, cutoff=CLOSE)
    return f". Did you mean {close[0]}?" if close else ""


def show_version(args: argparse.Namespace) -> None:
    if args.output == "json":
        from tinkex.terminal.output import write_json

        write_json({"version": __version__, "protocol": PROTOCOL_VERSION, "python": sys.version.split()[0]})
    else:
        print(f"tinkex {__version__} (protocol {PROTOCOL_VERSION}, Python {sys.version.split()[0]})")
