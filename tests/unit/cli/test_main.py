"""The command as a whole: help, exit codes, start-up weight, error messages."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tinkex.cli import parser
from tinkex.cli.connect import config_for
from tinkex.testing import Answer, Drop, Hang, ScriptedService, Status

from .conftest import KEY, Saved, Tinkex, start

COMMANDS = [
    ["version"],
    ["doctor"],
    ["console"],
    ["chat"],
    ["sample"],
    ["models"],
    ["models", "list"],
    ["models", "add"],
    ["models", "rm"],
    ["run"],
    *(["run", verb] for verb in ("list", "info", "watch")),
    ["checkpoint"],
    *(["checkpoint", verb] for verb in ("list", "info", "publish", "unpublish", "set-ttl", "delete", "download")),
    ["export"],
]
LOCAL = [
    ["ps"],
    ["stop"],
    ["logs"],
    ["demo"],
    ["completion"],
    ["models", "pull"],
    ["serve"],
    ["key"],
    ["key", "create"],
    ["key", "list"],
    ["key", "revoke"],
    ["backup"],
    ["gc"],
    ["cluster"],
    ["cluster", "status"],
    ["cluster", "drain"],
    ["cluster", "move"],
    ["cluster", "up"],
    ["cluster", "down"],
]
"""Commands that use no service: they have no options for its address and key."""
FIRST = ["demo", "serve", "console", "chat", "doctor"]
"""What a new user needs, in this order."""


def test_the_installed_command_prints_its_version() -> None:
    command = Path(sys.executable).with_name("tinkex")
    done = subprocess.run([command, "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"tinkex {tinkex.__version__} (protocol 0.36.0")
    assert done.stderr == ""


def test_version_as_json_and_as_an_option(run: Tinkex) -> None:
    assert run("version", "-o", "json").json["version"] == tinkex.__version__
    assert run("--version").out == f"tinkex {tinkex.__version__}\n"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(run: Tinkex, words: list[str]) -> None:
    ran = run(*words, "--help")
    assert ran.code == 0
    assert "example" in ran.out
    assert f"  tinkex {' '.join(words)}" in ran.out
    assert "TINKER_API_KEY" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


@pytest.mark.parametrize("words", LOCAL, ids=" ".join)
def test_every_local_command_has_help_with_an_example_and_no_option_of_a_client(run: Tinkex, words: list[str]) -> None:
    ran = run(*words, "--help")
    assert ran.code == 0
    assert f"  tinkex {' '.join(words)}" in ran.out
    assert "--base-url" not in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


def test_every_command_is_tested_here() -> None:
    assert {words[0] for words in (*COMMANDS, *LOCAL)} == {*parser.COMMANDS, "version"}


def test_help_lists_every_command(run: Tinkex) -> None:
    shown = run("--help").out
    for name, (_, about) in parser.COMMANDS.items():
        assert name in shown and about in shown


@pytest.mark.parametrize(
    "words", [["version"], ["--help"], ["checkpoint", "--help"], ["sample", "--help"]], ids=" ".join
)
def test_help_and_version_load_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys; from tinkex.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'asyncio', 'orjson', 'pyqwest', 'google.protobuf', 'ssl', 'socket', 'tinkex.types', 'dataclasses'}\n"
        "sys.stderr.write(','.join(sorted(heavy & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_shared_options_may_come_before_or_after_the_command(run: Tinkex, saved: Saved) -> None:
    expected = run("run", "list", "-o", "json").json
    assert expected["runs"]
    for words in (
        ["-o", "json", "run", "list"],
        ["run", "-f", "json", "list"],
        ["--format", "json", "run", "list"],
        ["run", "list", "--output", "json"],
        ["-o", "table", "run", "list", "-f", "json"],
    ):
        assert run(*words).json == expected


def test_base_url_and_key_can_be_arguments(
    run: Tinkex, service: ScriptedService, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_BASE_URL")
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    ran = run("--base-url", service.url, "run", "list", "--api-key", KEY)
    assert ran.code == 0
    assert f"{saved.run_id[:8]}:0" in ran.out


def test_a_misused_command_ends_with_2(run: Tinkex) -> None:
    assert run("checkpoint", "list", "--limit", "-3").code == 2
    assert "12h" in run("checkpoint", "list", "--expires-within", "soon").err
    assert run("no-such-command").code == 2
    assert run("-o", "json").code == 2


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["run", "watch"], "`tinkex run list` shows your runs."),
        (["run", "info"], "`tinkex run list` shows your runs."),
        (["backup"], "  tinkex backup /mnt/backups/tinkex-monday"),
        (["no-such-command"], "  tinkex demo "),
    ],
)
def test_a_misused_command_says_what_to_do_next(run: Tinkex, words: list[str], advice: str) -> None:
    ran = run(*words)
    assert (ran.code, ran.out) == (2, "")
    assert advice in ran.err
    assert "--help` shows all options." in ran.err and "usage:" not in ran.err


def test_without_arguments_it_shows_the_first_steps(run: Tinkex) -> None:
    ran = run()
    assert (ran.code, ran.out, ran.err) == (0, run("--help").out, "")
    first_steps = ran.out.partition("first steps:\n")[2]
    assert [name for name in parser.COMMANDS if f"  tinkex {name}" in first_steps] == FIRST


@pytest.mark.parametrize("noun", ["run", "checkpoint", "models", "key"])
def test_a_group_alone_shows_its_commands(run: Tinkex, noun: str) -> None:
    ran = run(noun)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == run(noun, "--help").out


def test_every_example_is_a_command_that_exists() -> None:
    tried = 0
    for one in _parsers(parser.build_parser(list(parser.COMMANDS))):
        for line in (one.epilog or "").splitlines():
            if line.startswith("  tinkex "):
                words = shlex.split(re.split(r"\s{3,}|<", line.strip())[0])[1:]
                assert parser.build_parser(words).parse_args(words).run is not None, line
                tried += 1
    assert tried > 40


def _parsers(one: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield one
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _parsers(below)


def test_an_error_is_one_sentence_on_stderr_with_code_1(run: Tinkex, service: ScriptedService) -> None:
    ran = run("run", "info", "nobody")
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err == "tinkex: Not found (HTTP 404: training run 'nobody' is not known).\n"


def test_a_rejected_key_says_where_to_set_it(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-not-the-right-one")
    ran = run("run", "list")
    assert ran.code == 1
    assert "TINKER_API_KEY" in ran.err
    assert "tml-not" not in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_missing_key_is_one_sentence(run: Tinkex) -> None:
    ran = run("run", "list", "--base-url", "https://tinker.invalid")
    assert ran.code == 1
    assert ran.err.startswith("tinkex: No API key. Pass api_key=..., or set TINKER_API_KEY.")


def test_retries_are_announced_and_end_soon(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_MAX_RETRIES", "2")
    service.script.on("*", do=Drop())
    ran = run("run", "list")
    assert ran.code == 1
    first, last = ran.err.splitlines()
    assert first.startswith("Retrying in 0.")
    assert "gave up after 2 attempts" in last and "tinkex doctor" in last


def test_an_invalid_response_is_one_sentence(run: Tinkex, service: ScriptedService) -> None:
    service.script.on("list_training_runs", do=Answer("<html>", content_type="text/html"))
    ran = run("run", "list")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    assert "Traceback" not in ran.err and "defect" not in ran.err


@pytest.mark.parametrize("words", [["--debug", "run", "info", "x"], ["run", "info", "x", "--debug"]])
def test_debug_shows_the_traceback(words: list[str], service: ScriptedService) -> None:
    done = start(*words)
    _, err = done.communicate(timeout=30)
    assert done.returncode == 1
    assert "Traceback" in err and "NotFoundError" in err
    assert KEY not in err


def test_tinker_log_debug_shows_the_traceback(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOG", "debug")
    done = start("run", "info", "x")
    _, err = done.communicate(timeout=30)
    assert "Traceback" in err
    assert KEY not in err


def test_ctrl_c_leaves_a_clean_message_and_130(service: ScriptedService) -> None:
    service.script.on("list_training_runs", do=Hang())
    running = start("run", "list")
    service.wait_for_requests("list_training_runs")
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=10)
    assert running.returncode == 130
    assert (out, err.strip()) == ("", "tinkex: stopped.")


def test_a_broken_pipe_is_silent(service: ScriptedService, saved: Saved) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    running = start("checkpoint", "list", stdout=writer)
    os.close(writer)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 141
    assert err == ""


def test_characters_that_the_terminal_lacks_do_not_end_a_command(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    service.script.on("list_training_runs", do=Status(400, "naïve"))
    running = start("run", "list")
    _, err = running.communicate(timeout=30)
    assert (running.returncode, err) == (1, "tinkex: The service rejected the request (HTTP 400: na?ve).\n")


def test_a_command_retries_less_than_a_run_unless_settings_say_otherwise(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = argparse.Namespace(base_url=None, api_key=None)
    assert (config_for(args).max_retries, config_for(args).unreachable_s) == (5, 60.0)
    monkeypatch.setenv("TINKEX_MAX_RETRIES", "20")
    assert (config_for(args).max_retries, config_for(args).unreachable_s) == (20, 60.0)


def test_reading_opens_no_session(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    for words in (
        ["run", "list"],
        ["run", "info", saved.run_id],
        ["checkpoint", "list"],
        ["checkpoint", "info", saved.state],
        ["checkpoint", "publish", saved.state],
        ["checkpoint", "unpublish", saved.state],
        ["checkpoint", "set-ttl", saved.state, "keep"],
        ["checkpoint", "delete", "-y", saved.sampler],
        ["doctor"],
    ):
        assert run(*words).code == 0, words
    assert not service.sessions
    assert not service.requests_to("create_session")


@pytest.mark.parametrize("status", [402, 403, 409, 422, 500])
def test_every_status_becomes_a_sentence_that_names_it(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("TINKEX_MAX_RETRIES", "1")
    service.script.on("list_training_runs", do=Status(status, "the reason"))
    ran = run("run", "list")
    assert ran.code == 1
    assert f"(HTTP {status}: the reason)." in ran.err
    assert "Error code" not in ran.err
    assert len(ran.err.splitlines()) == 1
