"""`tinkex completion`: prints a script that lets a shell complete commands, options, fixed values and files.

`shtab` writes the script from the parser itself, so it is never out of date. Ids of runs and checkpoints are not
completed: a key press must not call a service.
"""

from __future__ import annotations

import argparse
import re

from tinkex.cli.parser import COMMANDS, CommandParser, build_parser

SHELLS = ("bash", "zsh", "fish")
MORE = """\
The script makes the Tab key complete commands, options, values and files; it calls no service. To
enable it in every new shell: for bash, add `source <(tinkex completion bash)` to ~/.bashrc; for
zsh, add `source <(tinkex completion zsh)` to ~/.zshrc, after compinit; for fish, write the script
to ~/.config/fish/completions/tinkex.fish."""
HINT = "Name your shell: bash, zsh or fish. For bash, for example: source <(tinkex completion bash)"


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "completion", completion, about, "tinkex completion bash", "tinkex completion zsh", more=MORE, hint=HINT,
        is_local=True,
    )  # fmt: skip
    command.add_argument("shell", choices=SHELLS, help="the shell that the script is for")


def completion(args: argparse.Namespace) -> None:
    print(script(args.shell))


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    import shtab  # not at the top: only this command needs it

    parser = build_parser(list(COMMANDS))  # every command is named, so that every command is loaded
    _mark_files(parser, {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "DIR": shtab.DIRECTORY})
    # shtab registers its zsh function only under `eval`; then `source <(...)` would run it at once.
    text: str = shtab.complete(parser, shell)
    return text.replace("[[ $zsh_eval_context[-1] == eval ]]", "[[ $zsh_eval_context[-1] != loadautofunc ]]")


def _mark_files(parser: argparse.ArgumentParser, completers: dict[str, object]) -> None:
    """Complete files and folders where the help says FILE, FOLDER or DIR."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _mark_files(child, completers)
            continue
        for word in re.findall(r"\w+", str(action.metavar or action.dest.upper())):
            if word in completers and action.nargs != 0:
                action.complete = completers[word]  # type: ignore[attr-defined]
