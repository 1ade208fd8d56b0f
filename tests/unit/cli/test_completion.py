"""`tinkex completion`: the scripts, run in the shells they are for. zsh and fish are tried where they are installed."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.cli.commands.completion import SHELLS, script
from tinkex.cli.parser import COMMANDS, build_parser

from .conftest import Tinkex

INSTALLED = [shell for shell in SHELLS if shell == "bash" or shutil.which(shell)]
COMPLETE = {
    "bash": 'source "$1"; shift\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_tinkex\n'
    'printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": 'source $argv[1]\ncomplete -C (string join -- " " $argv[2..-1])',
}
"""What prints the completions of a command line. zsh has no such way: its completion needs a line editor."""


@pytest.fixture(params=[shell for shell in INSTALLED if shell in COMPLETE])
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file and a folder whose names have a space."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "my keys.txt").touch()
    (tmp_path / "here" / "my data").mkdir()
    return tmp_path / "here"


def completions(shell: str, folder: Path, *line: str) -> list[str]:
    """Return what the shell offers for the last word of a command line."""
    file = folder.parent / f"completion.{shell}"
    file.write_text(script(shell), encoding="utf-8")
    options = ["--no-config"] if shell == "fish" else ["--norc"]
    name = [] if shell == "fish" else ["-"]
    done = subprocess.run(
        [shell, *options, "-c", COMPLETE[shell], *name, file, "tinkex", *line],
        capture_output=True, text=True, check=True, cwd=folder, timeout=30,
    )  # fmt: skip
    assert done.stderr == ""
    offered = [entry.partition("\t")[0].replace("\\ ", " ").rstrip("/") for entry in done.stdout.splitlines()]
    return sorted(filter(None, offered))


@pytest.mark.parametrize("shell", INSTALLED)
def test_the_shell_accepts_its_script(shell: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script(shell), encoding="utf-8")
    done = subprocess.run([shell, "-n", file], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_the_script_registers_itself_with_bash(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script("bash"), encoding="utf-8")
    done = subprocess.run(
        ["bash", "--norc", "-c", f"source '{file}'; complete -p tinkex"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "complete -o bashdefault -F _shtab_tinkex tinkex\n"


def test_the_script_registers_itself_with_zsh_when_it_is_sourced(tmp_path: Path) -> None:
    text = script("zsh")
    assert "if [[ $zsh_eval_context[-1] != loadautofunc ]]; then" in text, "shtab has changed: see completion.script"
    if "zsh" not in INSTALLED:
        return
    (tmp_path / "script").write_text(text, encoding="utf-8")
    ask = f"autoload -Uz compinit; compinit -u -D; source {tmp_path}/script; print -- $_comps[tinkex]"
    done = subprocess.run(["zsh", "-f", "-c", ask], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("_shtab_tinkex\n", "")


def test_commands_are_completed_at_every_level(shell: str, folder: Path) -> None:
    assert completions(shell, folder, "") == sorted([*COMMANDS, "version"])
    assert completions(shell, folder, "che") == ["checkpoint"]
    assert completions(shell, folder, "run", "i") == ["info"]
    assert completions(shell, folder, "-o", "json", "run", "w") == ["watch"]


def test_options_are_completed_after_a_dash(shell: str, folder: Path) -> None:
    assert completions(shell, folder, "run", "list", "--li") == ["--limit"]
    assert {"--until-idle", "--idle-for", "--output"} <= set(completions(shell, folder, "run", "watch", "--"))
    assert "--limit" not in completions(shell, folder, "run", "watch", "--")


def test_values_are_completed_where_there_is_a_choice(shell: str, folder: Path) -> None:
    assert completions(shell, folder, "run", "list", "-o", "") == ["json", "table"]
    assert completions(shell, folder, "completion", "") == sorted(SHELLS)
    assert completions(shell, folder, "run", "list", "--limit", "") == []


def test_files_and_folders_are_completed_where_they_are_expected(shell: str, folder: Path) -> None:
    assert completions(shell, folder, "serve", "--keys-file", "") == ["my data", "my keys.txt"]
    assert completions(shell, folder, "serve", "--data-dir", "") == ["my data"]
    assert completions(shell, folder, "backup", "") == ["my data"]
    assert completions(shell, folder, "run", "info", "") == []


def test_every_visible_option_is_in_every_script() -> None:
    for shell in SHELLS:
        text = script(shell)
        for option in _options(build_parser(list(COMMANDS))):
            assert (option if shell != "fish" else option.lstrip("-")) in text, (shell, option)
    assert "--private" not in script("bash"), "an option that is hidden in the help is not completed"


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _options(child)
        elif action.help != argparse.SUPPRESS:
            yield from action.option_strings


def test_without_a_shell_it_says_how_to_name_one(run: Tinkex) -> None:
    ran = run("completion")
    assert (ran.code, ran.out) == (2, "")
    assert "Name your shell: bash, zsh or fish." in ran.err and "source <(tinkex completion bash)" in ran.err
