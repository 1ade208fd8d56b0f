"""Every command finds the service of this machine, and says what to do where there is none."""

from __future__ import annotations

import json
import logging
import socket
import time
from pathlib import Path

import pytest

import tinkex
from tinkex.home.users import UserLock
from tinkex.testing import Answer, ScriptedService

from .conftest import KEY, OWNER_KEY, Saved, Tinkex

LOOKERS = (["run", "list"], ["checkpoint", "list"], ["models", "list"], ["chat"], ["sample", "x"])
ADMINISTER = (["gc"], ["gc", "--dry-run"], ["backup", "copy"], ["key", "list"], ["key", "revoke", "k-1"])


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("words", LOOKERS)
def test_without_a_service_one_sentence_names_the_two_things_to_do(
    run: Tinkex, environment: Path, words: list[str]
) -> None:
    ran = run(*words)
    assert ran.code == 1
    assert ran.err == (
        "tinkex: No service: no setting names one, and none runs on this machine's data folder "
        f"({environment}/.local/share/tinkex). Start one with `tinkex serve`, or set TINKER_BASE_URL (for the hosted "
        "service: TINKER_API_KEY).\n"
    )
    assert not (environment / ".local").exists(), "a command that looks for a service creates nothing"


def test_every_command_uses_the_service_of_the_home_with_its_owners_key(run: Tinkex, at_home: ScriptedService) -> None:
    for words in (["run", "list"], ["checkpoint", "list"], ["models", "list"]):
        ran = run(*words)
        assert ran.code == 0, ran.err
    assert all(request.headers["x-api-key"] == OWNER_KEY for request in at_home.requests)
    ran = run("doctor")
    assert ran.code == 0 and f"{at_home.url} (from: the service on this machine)" in ran.out
    assert OWNER_KEY not in ran.out


def test_a_setting_names_another_service_than_that_of_the_home(
    run: Tinkex, at_home: ScriptedService, saved: Saved, service: ScriptedService
) -> None:
    assert saved.run_id in run("run", "list", "-o", "json").out
    assert saved.run_id in run("run", "list", "--base-url", service.url, "--api-key", KEY, "-o", "json").out
    assert not at_home.requests


def test_a_key_alone_is_that_of_the_hosted_service(
    run: Tinkex, at_home: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKEX_PROXY", f"http://127.0.0.1:{closed_port()}")
    ran = run("run", "list")
    assert ran.code == 1 and "on the way to https://tinker.thinkingmachines.dev" in ran.err
    assert not at_home.requests


@pytest.mark.parametrize("words", [["run", "list"], ["chat"], ["sample", "x"], ["console"], ["models", "list"]])
@pytest.mark.timing
def test_a_server_that_is_down_is_told_in_one_line_within_a_second(
    run: Tinkex, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Before: six lines and 6 to 7 seconds."""
    url = f"http://127.0.0.1:{closed_port()}"
    monkeypatch.setenv("TINKER_BASE_URL", url)
    began = time.monotonic()
    ran = run(*words)
    assert time.monotonic() - began < 1
    assert ran.code == 1 and len(ran.err.splitlines()) == 1
    assert f"No service responds at {url} (from TINKER_BASE_URL)" in ran.err and "tinkex serve" in ran.err


def test_the_error_of_a_client_without_settings_names_the_local_service(at_home: ScriptedService) -> None:
    with pytest.raises(tinkex.ConfigError, match=rf"No API key.* at {at_home.url}: tinkex.local\(\) joins it"):
        tinkex.ServiceClient()


def test_the_first_call_says_at_once_that_there_is_no_response(caplog: pytest.LogCaptureFixture) -> None:
    """Before: silence until the third attempt. At the second attempt there is one line."""
    url = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(tinkex.APIConnectionError), caplog.at_level(logging.WARNING, "tinkex.wait"):
        tinkex.ServiceClient(base_url=url, max_retries=2).get_server_capabilities()
    assert caplog.messages[0].startswith(f"No response from {url} (")


def test_no_key_is_not_called_a_wrong_key(run: Tinkex) -> None:
    """Before: "the key … is unknown or was revoked", though none was sent."""
    with ScriptedService() as service:
        service.script.on("list_training_runs", do=Answer({"detail": "No API key. Send it."}, status=401))
        ran = run("run", "list", "--base-url", service.url)
    assert ran.err.startswith("tinkex: The service needs an API key, and none is set (HTTP 401: No API key.")


@pytest.mark.parametrize("words", ADMINISTER, ids=" ".join)
def test_commands_on_data_that_does_not_exist_create_nothing(
    run: Tinkex, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a folder and an empty database, and a backup of it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()  # it exists: a cache or a log may be in it
    ran = run(*words, "--data-dir", str(folder))
    assert ran.code == 1 and f"{folder} holds no data of a service" in ran.err
    assert list(folder.iterdir()) == [] and not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["servee"], "there is no command 'servee'. Did you mean serve?"),
        (["run", "lst"], "tinkex run: there is no command 'lst'. Did you mean list?"),
        (["serve", "--prot", "99"], "tinkex serve: unrecognized arguments: --prot. Did you mean --port?"),
        (
            ["chat", "--temprature=1"],
            "tinkex chat: unrecognized arguments: --temprature=1. Did you mean --temperature?",
        ),
        (["run", "list", "--limt", "3"], "Did you mean --limit?"),
        (["sample", "--xyzzy"], "tinkex sample: unrecognized arguments: --xyzzy\n"),
    ],
)
def test_a_misspelt_word_is_told_with_the_one_that_was_probably_meant(
    run: Tinkex, words: list[str], meant: str
) -> None:
    ran = run(*words)
    assert ran.code == 2 and meant in ran.err, ran.err


def test_the_help_of_serve_has_defaults_and_choices(run: Tinkex) -> None:
    text = " ".join(run("serve", "--help").out.split())
    assert "--port PORT The port to listen on; 0 takes any that is free. (default 8642; TINKEX_PORT)" in text
    assert "--decode-weights float32|bfloat16|int8" in text
    assert "[MODEL ...]" in text


def test_ps_stop_and_logs_without_a_service(run: Tinkex, environment: Path) -> None:
    assert "tinkex serve --background" in run("ps").err
    assert run("ps", "-o", "json").json == {"services": []}
    assert run("stop").err == f"No service runs on {environment}/.local/share/tinkex.\n"
    assert "has no log" in run("logs").err
    assert not (environment / ".local").exists()


def test_ps_shows_the_service_and_stop_asks_before_it_takes_it_from_a_program(
    run: Tinkex, at_home: ScriptedService, environment: Path
) -> None:
    user = UserLock(environment / ".local/share/tinkex")
    row = run("ps").out.splitlines()[1].split()
    assert row[0] == at_home.url and row[2] == "tinkex/tiny"
    ran = run("stop")
    assert ran.code == 1 and "in use by 1 program" in ran.err and "--force" in ran.err
    assert "logs to the terminal" in run("logs").err
    user.release()


def test_the_banner_has_the_line_to_export_and_its_own_address(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before: `--port 8650` said "(`tinkex console` opens it)", which opened another service."""
    from tinkex.cli.service.serve import announce
    from tinkex.settings import resolve_serve

    url = "http://127.0.0.1:8650"
    announce(resolve_serve(data_dir=tmp_path), url, needs_key=False, as_json=False)
    said = capsys.readouterr().out
    assert f"export TINKER_BASE_URL={url} TINKER_API_KEY=tml-local" in said
    assert f"`tinkex console --base-url {url}` opens it" in said
    announce(resolve_serve(), url, needs_key=False, as_json=False)
    assert "(`tinkex console` opens it)" in capsys.readouterr().out


def test_what_a_service_says_of_itself_holds_no_secret(tmp_path: Path) -> None:
    from tinkex.settings import resolve_serve, shown_settings

    secrets = {"api_keys": ["tml-very-secret"], "database_url": "postgresql://me:very-secret@db/x"}
    config = resolve_serve({}, data_dir=tmp_path, cluster_secret="very-secret" * 8, **secrets)
    shown = json.dumps(shown_settings(config))
    assert "very-secret" not in shown and '"threads": 0' in shown
