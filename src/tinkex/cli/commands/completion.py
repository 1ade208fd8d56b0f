"""`tinkex completion`: a script that lets a shell complete our words, made from the parser itself: never out of date.

Offered are commands, options, and the values of those that have a fixed set; files and folders where the help says FILE
or FOLDER. Runs and checkpoints are not: no key press may ask a service.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.cli.main import Words

FILE, FOLDER, ANY = "<file>", "<folder>", "<any>"
MORE = """\
Prints a script that makes the Tab key complete commands, options and files; it asks no service. To
have it in every new shell: for bash, add the line `source <(tinkex completion bash)` to ~/.bashrc;
for zsh, `source <(tinkex completion zsh)` to ~/.zshrc, after compinit; for fish, write the script
to ~/.config/fish/completions/tinkex.fish."""


class Option(NamedTuple):
    names: tuple[str, ...]
    about: str
    takes: str
    """What its value is: "" (it has none), FILE, FOLDER, ANY, or the words to choose from."""


class Command(NamedTuple):
    at: str
    """The words that lead here: "" for `tinkex` itself, "/run/list"."""
    commands: dict[str, str]
    """Those below it, and what they are for."""
    options: list[Option]
    takes: str
    """What its arguments are, as of an option."""


def add(words: Words, about: str) -> None:
    made = words.add(
        "completion", completion, about, "tinkex completion bash", "tinkex completion zsh", more=MORE, is_local=True
    )
    made.add_argument("shell", choices=tuple(WRITERS), help="which shell the script is for")


def completion(args: argparse.Namespace) -> int:
    print(script(args.shell), end="")
    return 0


def script(shell: str) -> str:
    from tinkex.cli.main import NOUNS, parser

    tree = list(commands_of(parser(list(NOUNS))))  # each of them named, so that each is loaded
    return WRITERS[shell](tree)


def commands_of(parser: argparse.ArgumentParser, at: str = "") -> Iterator[Command]:
    """A command and all below it."""
    below: dict[str, argparse.ArgumentParser] = {}
    about: dict[str, str] = {}
    options, takes = [], ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
            about = {entry.dest: _plain(entry) for entry in action._choices_actions}
        elif action.option_strings and action.help != argparse.SUPPRESS:
            options.append(Option(tuple(action.option_strings), _plain(action), _taken(action)))
        elif not action.option_strings and _taken(action) != ANY:
            takes = takes or _taken(action)
    yield Command(at, about, options, takes)
    for name, child in below.items():
        yield from commands_of(child, f"{at}/{name}")


def _taken(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices:
        return " ".join(map(str, action.choices))
    named = str(action.metavar or action.dest.upper())
    if re.search(r"\bFILE\b", named):
        return FILE
    return FOLDER if re.search(r"\b(FOLDER|DIR)\b", named) else ANY


def _plain(action: argparse.Action) -> str:
    """The first sentence of the help."""
    text = " ".join((action.help or "").replace("%%", "%").split())
    return re.split(r"(?<=[a-z`])[.;] ", text)[0].rstrip(".")


def bash(tree: list[Command]) -> str:
    return f"""\
# Completion of `tinkex` for bash, made by `tinkex completion bash`.
_tinkex() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" at="" kind="" i
    if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at/${{COMP_WORDS[i]}}" in
            {"|".join(_ats(tree))}) at="$at/${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$at $prev" in
{_cases(_option_kinds(tree), 8, "kind")}
    esac
    if [[ -z $kind ]]; then
        case "$at$cur" in
{_cases({f'"{command.at}-"*': " ".join(_names(command)) for command in tree}, 12, "kind")}
            *) case "$at" in
{_cases({f'"{command.at}"': kind for command in tree if (kind := _arguments(command))}, 16, "kind")}
            esac ;;
        esac
    fi
    local IFS=$'\n'  # names of files may have spaces; no mapfile, which the bash of macOS lacks
    COMPREPLY=()
    case "$kind" in
        "{FILE}") compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$cur")) ;;
        "{FOLDER}") compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$cur")) ;;
        "{ANY}"|"") ;;
        *) COMPREPLY=($(IFS=' '; compgen -W "$kind" -- "$cur")) ;;
    esac
}}
complete -F _tinkex tinkex
"""


def zsh(tree: list[Command]) -> str:
    offered = []
    for command in tree:
        options = [f"{name}:{option.about}" for option in command.options for name in option.names]
        below = [f"{name}:{about}" for name, about in command.commands.items()]
        offered.append(f'        "{command.at}") options=({_quoted(options)}); commands=({_quoted(below)}) ;;')
    return f"""\
#compdef tinkex
# Completion of `tinkex` for zsh, made by `tinkex completion zsh`.
_tinkex() {{
    local cur="$words[CURRENT]" prev="$words[CURRENT-1]" at="" kind="" i
    local -a options commands
    for ((i = 2; i < CURRENT; i++)); do
        case "$at/$words[i]" in
            {"|".join(_ats(tree))}) at="$at/$words[i]" ;;
        esac
    done
    if [[ $cur == --*=* ]]; then prev="${{cur%%=*}}"; compset -P '*='; fi
    case "$at $prev" in
{_cases(_option_kinds(tree), 8, "kind")}
    esac
    case "$at" in
{chr(10).join(offered)}
    esac
    if [[ -z $kind && $cur == -* ]]; then
        _describe -o 'option' options
        return
    fi
    if [[ -z $kind ]]; then
        case "$at" in
{_cases({f'"{command.at}"': command.takes for command in tree if command.takes}, 12, "kind")}
        esac
    fi
    case "$kind" in
        "{FILE}") _files ;;
        "{FOLDER}") _files -/ ;;
        "{ANY}") ;;
        "") (( $#commands )) && _describe 'command' commands ;;
        *) compadd -- ${{=kind}} ;;
    esac
}}
if [[ "$funcstack[1]" == "_tinkex" ]]; then _tinkex "$@"; else compdef _tinkex tinkex; fi
"""


def fish(tree: list[Command]) -> str:
    lines = [
        "# Completion of `tinkex` for fish, made by `tinkex completion fish`.",
        "function __tinkex_at",
        "    set -l at ''",
        "    for word in (commandline -opc)[2..-1]",
        '        switch "$at/$word"',
        f"            case {' '.join(_ats(tree))}",
        '                set at "$at/$word"',
        "        end",
        "    end",
        '    test "$at" = "$argv[1]"',
        "end",
        "complete -c tinkex -f",
    ]
    for command in tree:
        start = f"complete -c tinkex -n \"__tinkex_at '{command.at}'\""
        lines += [f"{start} -a {name} -d {_quote(about)}" for name, about in command.commands.items()]
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            lines.append(f"{start} {names} {_fish_value(option.takes)}-d {_quote(option.about)}")
        if command.takes:
            lines.append(f"{start} {_fish_value(command.takes).replace('-x ', '').replace('-r ', '')}".rstrip())
    return "\n".join(lines) + "\n"


def _fish_value(takes: str) -> str:
    values = {"": "", ANY: "-x ", FILE: "-r -F ", FOLDER: "-x -a '(__fish_complete_directories)' "}
    return values.get(takes, f"-x -a {_quote(takes)} ")


def _option_kinds(tree: list[Command]) -> dict[str, str]:
    """Patterns of "where option" → what the option takes. An option that is the same everywhere needs one pattern."""
    found: dict[str, dict[str, str]] = {}
    for command in tree:
        for option in command.options:
            for name in option.names:
                found.setdefault(name, {})[command.at] = option.takes
    kinds: dict[str, str] = {}
    for name, places in found.items():
        if len(set(places.values())) == 1:
            kinds[f'*" {name}"'] = next(iter(places.values()))
        else:
            kinds |= {f'"{at} {name}"': takes for at, takes in places.items()}
    return {pattern: takes for pattern, takes in kinds.items() if takes}


def _cases(kinds: dict[str, str], indent: int, variable: str) -> str:
    """Branches of a `case`, one for each value."""
    patterns: dict[str, list[str]] = {}
    for pattern, kind in kinds.items():
        patterns.setdefault(kind, []).append(pattern)
    return "\n".join(
        f"{' ' * indent}{'|'.join(found)}) {variable}={_quote(kind)} ;;" for kind, found in patterns.items()
    )


def _ats(tree: list[Command]) -> list[str]:
    return [command.at for command in tree if command.at]


def _names(command: Command) -> list[str]:
    return [name for option in command.options for name in option.names]


def _arguments(command: Command) -> str:
    """What may stand here that is no option."""
    return " ".join(command.commands) or command.takes


def _quoted(texts: list[str]) -> str:
    return " ".join(map(_quote, texts))


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


WRITERS = {"bash": bash, "zsh": zsh, "fish": fish}
