"""The `tinkex` command: its words, its exit codes, and what it says when something goes wrong.

Exit codes: 0 done, 1 failed (one sentence on stderr), 2 misused, 130 stopped with Ctrl-C, 141 the reader went away.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tinkex._version import PROTOCOL_VERSION, __version__

ABOUT = "Fine-tune language models through the Tinker API: on a service of your own, or on the hosted one."
EXAMPLES = """\
first steps:
  tinkex demo                  watch a small model learn something on this machine
  tinkex serve                 run a service of your own, at http://127.0.0.1:8642
  tinkex console               look at its runs and checkpoints in the browser
  tinkex chat                  talk to a model, or to what you have trained
  tinkex doctor                find out what is wrong with the set-up

The service and the key come from TINKER_BASE_URL and TINKER_API_KEY; for a service of your own on
this machine: export TINKER_BASE_URL=http://127.0.0.1:8642. `tinkex COMMAND --help` tells more.
"""
NOUNS = {
    "demo": "watch a small model learn something on this machine",
    "serve": "run a service on this machine",
    "console": "look at your service in the browser",
    "chat": "talk to a model, or to what you have trained",
    "sample": "let a model go on from a prompt",
    "models": "list base models, and fetch them",
    "run": "look at training runs, and watch them",
    "checkpoint": "look after saved weights",
    "export": "turn a checkpoint into files for other programs",
    "doctor": "find out what is wrong with the set-up",
    "key": "say who may use your service",
    "backup": "copy all that your service keeps",
    "gc": "free the space of what your service needs no more",
    "completion": "let your shell complete the words of this command",
}
"""Commands with a file of their own, and what they are for."""
ON_THIS_MACHINE = {"demo", "serve", "key", "backup", "gc"}
"""Commands in `cli/service`: they run or administer a service on this machine. All others are in `cli/commands`."""
MISUSED = 2
DEFAULTS = {"output": "table", "base_url": None, "api_key": None, "debug": False}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a letter the terminal lacks must not end the command
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser(argv).print_help()
        return 0
    args = parser(argv).parse_args(argv)
    for name, value in DEFAULTS.items():
        vars(args).setdefault(name, value)
    try:
        if args.run is not version:
            _set_up_logging(args)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ntinkex: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 141
    except Exception as problem:
        return _failed(problem, args)


def parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The words of the command line. The shared options may stand before and after the command."""
    # Absent unless given: a default of the inner parser would overwrite what stood before the command.
    local = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS, formatter_class=Formatter)
    group = local.add_argument_group("everywhere")
    group.add_argument(
        "-o", "--output", "-f", "--format", dest="output", choices=("table", "json"), help="for people, or for programs"
    )
    group.add_argument("--debug", action="store_true", help="log everything, and show tracebacks")
    shared = argparse.ArgumentParser(
        add_help=False, argument_default=argparse.SUPPRESS, formatter_class=Formatter, parents=[local]
    )
    group = shared.add_argument_group("the service")
    group.add_argument("--base-url", metavar="URL", help="the service (default: TINKER_BASE_URL)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="discouraged: other users of this machine can read command lines. Set TINKER_API_KEY instead",
    )
    top = argparse.ArgumentParser(
        "tinkex",
        description=ABOUT,
        epilog=EXAMPLES,
        parents=[shared],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"tinkex {__version__}")
    words = Words(top, "tinkex", shared, local)
    for name, about in NOUNS.items():
        if name in argv:
            folder = "service" if name in ON_THIS_MACHINE else "commands"
            import_module(f"tinkex.cli.{folder}.{name}").add(words, about)
        else:  # only its name is needed, for the list: what nobody asks for is not loaded
            words.add(name, None, about)
    words.add("version", version, "which tinkex this is", "tinkex version -o json")
    return top


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal. argparse makes one for every option, and would load `shutil` for the width."""

    def __init__(self, prog: str) -> None:
        try:
            width = os.get_terminal_size(sys.__stdout__.fileno()).columns - 2  # type: ignore[union-attr]
        except (OSError, ValueError, AttributeError):
            width = 98
        super().__init__(prog, width=max(width, 40))


class Words:
    """Adds commands that all have the shared options, a description and an example.

    A local command talks to no service, so it has the options for output only.
    """

    def __init__(
        self,
        above: argparse.ArgumentParser,
        prog: str,
        shared: argparse.ArgumentParser,
        local: argparse.ArgumentParser,
        *,
        is_needed: bool = True,
    ) -> None:
        # Named here because argparse would otherwise load its formatter to find the name out.
        self._commands = above.add_subparsers(title="commands", metavar="COMMAND", required=is_needed, prog=prog)
        self._prog = prog
        self._shared = shared
        self._local = local

    def add(
        self, name: str, run: Any, about: str, *examples: str, more: str = "", is_local: bool = False
    ) -> argparse.ArgumentParser:
        """A command that runs `run(args)`; with None for it, a noun that has commands of its own."""
        made: argparse.ArgumentParser = self._commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}." + (f"\n\n{more}" if more else ""),
            epilog="\n  ".join(("examples:" if len(examples) > 1 else "example:", *examples)),
            parents=[self._local if is_local else self._shared],
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        if run is not None:
            made.set_defaults(run=run)
        return made

    def noun(self, name: str, about: str, *examples: str, more: str = "", is_local: bool = False) -> Words:
        """A word that has commands of its own. Alone it shows them; argparse would only say that one is missing."""

        def teach(args: argparse.Namespace) -> int:
            made.print_help(sys.stderr)
            return MISUSED

        made = self.add(name, teach, about, *examples, more=more, is_local=is_local)
        shared = self._local if is_local else self._shared
        return Words(made, f"{self._prog} {name}", shared, self._local, is_needed=False)


def version(args: argparse.Namespace) -> int:
    if args.output == "json":
        from tinkex.terminal.output import write_json

        write_json({"version": __version__, "protocol": PROTOCOL_VERSION, "python": sys.version.split()[0]})
    else:
        print(f"tinkex {__version__} (protocol {PROTOCOL_VERSION}, Python {sys.version.split()[0]})")
    return 0


def _set_up_logging(args: argparse.Namespace) -> None:
    from tinkex.settings import log_level

    level = "debug" if args.debug else log_level()
    args.debug = level == "debug"
    if level in ("debug", "info"):
        import logging

        logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _failed(problem: Exception, args: argparse.Namespace) -> int:
    if args.debug:
        import traceback

        traceback.print_exc()
    print(f"tinkex: {sentence(problem)}", file=sys.stderr)
    return 1


def sentence(problem: Exception) -> str:
    """What went wrong and what to do, for somebody who has not read the code. Holds no secret."""
    from tinkex import errors
    from tinkex.redact import redact

    text = str(problem) or type(problem).__name__
    if isinstance(problem, errors.APIStatusError):
        text = _about_status(problem)
    elif isinstance(problem, errors.APIConnectionError):
        text = f"{text.rstrip('.')}. `tinkex doctor` finds out why."
    elif isinstance(problem, OSError) and not isinstance(problem, errors.TinkexError) and problem.filename:
        text = f"{problem.filename}: {problem.strerror}."
    elif not isinstance(problem, (errors.TinkexError, OSError)):
        text = f"{type(problem).__name__}: {text} (a defect of tinkex: run it again with --debug and report it)"
    text = " ".join(text.split())
    # Our own words about settings hold no value of them, but examples that look like one.
    return text if isinstance(problem, errors.ConfigError) else redact(text)


def _about_status(problem: Any) -> str:
    body = problem.body
    detail = body.get("detail") if isinstance(body, dict) else body
    if isinstance(body, dict) and isinstance(body.get("error"), dict):  # OpenAI's form
        detail = body["error"].get("message")
    said = f"HTTP {problem.status_code}" + (f": {str(detail).rstrip('.')}" if detail else "")
    if problem.status_code == 401:
        return f"The service refused the API key ({said}). Set TINKER_API_KEY; `tinkex doctor` says which key is used."
    what = {402: "The account cannot pay", 403: "Not allowed", 404: "Not found"}.get(problem.status_code)
    if ". Last error:" in problem.message:  # after several attempts the message says how many
        what = problem.message.partition(". Last error:")[0]
    return f"{what or ('The service failed' if problem.status_code >= 500 else 'The service refused')} ({said})."


def _silence_stdout() -> None:
    """Python flushes stdout once more at exit, which would complain about the broken pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # no real file behind it: nothing will be flushed
