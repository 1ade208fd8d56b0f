"""`tinkex completion`: its scripts in the shells they are for. zsh and fish are tried where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tinkex.cli.commands.completion import WRITERS, commands_of, script
from tinkex.cli.main import NOUNS, parser

SHELLS = [shell for shell in WRITERS if shell == "bash" or shutil.which(shell)]
ASK = {
    "bash": 'source "$1"; shift\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tinkex\nprintf "%s\\n" "${COMPREPLY[@]}"',
    # Completion needs a line editor; here its builtins print what they are given.
    "zsh": 'compdef() { : }\n_describe() { print -l -- ${${(P)@[-1]}%%:*} }\ncompadd() { shift; print -l -- $@ }\n'
    '_files() { [[ $1 == -/ ]] && print -l -- *(N-/) || print -l -- *(N) }\ncompset() { : }\n'
    'source "$1"; shift\nwords=("$@"); CURRENT=$#; _tinkex\ntrue',
    "fish": 'source $argv[1]\ncomplete -C (string join -- " " $argv[2..-1])',
}  # fmt: skip


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a file and a folder, whose names have a space."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "my keys.txt").touch()
    (tmp_path / "here" / "my data").mkdir()
    return tmp_path / "here"


def offers(shell: str, folder: Path, *words: str) -> list[str]:
    """What the shell would offer for the last word."""
    file = folder.parent / f"completion.{shell}"
    file.write_text(script(shell), encoding="utf-8")
    flags = ["--no-config"] if shell == "fish" else ["-f"] if shell == "zsh" else ["--norc"]
    name = [] if shell == "fish" else ["-"]
    done = subprocess.run(
        [shell, *flags, "-c", ASK[shell], *name, str(file), "tinkex", *words],
        capture_output=True, text=True, check=True, cwd=folder, timeout=30,
    )  # fmt: skip
    assert done.stderr == ""
    found = [line.partition("\t")[0].rstrip("/") for line in done.stdout.splitlines() if line]
    if shell == "zsh" and words[-1]:  # the others look at the beginning of the word themselves
        found = [word for word in found if word.startswith(words[-1])]
    return sorted(found)


def test_a_shell_finds_no_fault_with_its_script(shell: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script(shell), encoding="utf-8")
    done = subprocess.run([shell, "-n", file], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_bash_knows_whom_to_ask(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script("bash"), encoding="utf-8")
    done = subprocess.run(
        ["bash", "--norc", "-c", f"source '{file}'; complete -p tinkex"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "complete -F _tinkex tinkex\n"


def test_commands_are_offered_at_every_level(shell: str, folder: Path) -> None:
    assert offers(shell, folder, "") == sorted([*NOUNS, "version"])
    assert offers(shell, folder, "che") == ["checkpoint"]
    assert offers(shell, folder, "run", "") == ["info", "list", "watch"]
    assert offers(shell, folder, "-o", "json", "run", "w") == ["watch"]


def test_options_are_offered_after_a_dash(shell: str, folder: Path) -> None:
    assert offers(shell, folder, "run", "list", "--li") == ["--limit"]
    assert {"--until-idle", "--idle-for", "--output"} <= set(offers(shell, folder, "run", "watch", "--"))
    assert "--limit" not in offers(shell, folder, "run", "watch", "--")


def test_values_are_offered_where_there_is_a_choice(shell: str, folder: Path) -> None:
    assert offers(shell, folder, "run", "list", "-o", "") == ["json", "table"]
    assert offers(shell, folder, "completion", "") == sorted(WRITERS)
    assert offers(shell, folder, "run", "list", "--limit", "") == []


def test_files_and_folders_are_offered_where_they_belong_and_nowhere_else(shell: str, folder: Path) -> None:
    assert offers(shell, folder, "serve", "--keys-file", "") == ["my data", "my keys.txt"]
    assert offers(shell, folder, "serve", "--data-dir", "") == ["my data"]
    assert offers(shell, folder, "backup", "") == ["my data"]
    assert offers(shell, folder, "run", "info", "") == []


def test_no_shown_option_of_any_command_is_left_out() -> None:
    tree = {command.at: command for command in commands_of(parser(list(NOUNS)))}
    for shell in WRITERS:
        text = script(shell)
        for at, command in tree.items():
            assert not at or at in text
            for option in command.options:
                names = [name if shell != "fish" else name.lstrip("-") for name in option.names]
                assert all(name in text for name in names), (shell, at, names)
    assert "--private" not in script("bash"), "what is hidden from people is not offered to them"
