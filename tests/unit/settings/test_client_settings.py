"""A client's settings: one row each, where each comes from, and what a wrong one says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.settings import CLIENT, KEYLESS, Config, is_loopback, resolve, sources

LOCAL = "http://127.0.0.1:1"


def test_every_field_has_a_row_and_every_row_but_the_command_a_field() -> None:
    fields = [entry.name for entry in dataclasses.fields(Config)]
    assert [row.name for row in CLIENT] == [*fields, "credential_cmd"]
    assert all(row.about.endswith(".") for row in CLIENT)


def test_an_argument_beats_the_environment_beats_the_file_beats_the_shared_environment(tmp_path: Path) -> None:
    file = tmp_path / "tinkex.toml"
    file.write_text('[client]\ntimeout_s = 1\nmax_retries = 2\ndeadline_s = 3\nhttp_proxy = "http://file"\n')
    environ = {
        "TINKEX_CONFIG": str(file), "TINKER_BASE_URL": LOCAL, "TINKEX_TIMEOUT_S": "4", "TINKEX_MAX_RETRIES": "5",
        "HTTP_PROXY": "http://shared", "HTTPS_PROXY": "http://shared", "TINKER_TAGS": "a, b,", "TINKER_TELEMETRY": "0",
    }  # fmt: skip
    config = resolve(environ, timeout_s=6, pools={"sample": 1})
    assert (config.timeout_s, config.max_retries, config.deadline_s) == (6, 5, 3)
    assert (config.http_proxy, config.https_proxy, config.tags) == ("http://file", "http://shared", ("a", "b"))
    assert (config.telemetry, config.api_key, config.pools["sample"], config.pools["train"]) == (False, KEYLESS, 1, 16)
    origin = sources(environ, timeout_s=6)
    assert (origin["timeout_s"], origin["max_retries"], origin["deadline_s"], origin["unreachable_s"]) == (
        "argument", "TINKEX_MAX_RETRIES", str(file), "default",
    )  # fmt: skip
    assert origin["https_proxy"] == "HTTPS_PROXY"


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("TINKEX_TIMEOUT_S", "soon", "TINKEX_TIMEOUT_S must be above 0 seconds, not 'soon'."),
        ("TINKEX_DEADLINE_S", "0", "TINKEX_DEADLINE_S must be above 0 seconds, not '0'."),
        ("TINKEX_MAX_RETRIES", "-1", "TINKEX_MAX_RETRIES must be a whole number from 0, not '-1'."),
        ("TINKER_API_KEY", "tml-é", "TINKER_API_KEY must be printable ASCII without a line break, as every key is. "),
        ("TINKEX_PROXY", "socks5://u:secret@x", "TINKEX_PROXY must be an http:// proxy (no other kind is supported)"),
    ],
)
def test_a_wrong_value_names_its_variable_and_shows_no_secret(variable: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        resolve({"TINKER_BASE_URL": LOCAL, variable: text})
    assert str(rejected.value).startswith(words)
    assert "secret" not in str(rejected.value) and "é" not in str(rejected.value)


def test_a_setting_of_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tinkex.toml"
    file.write_text("[client]\nlog = 'debug'\n")
    with pytest.raises(ConfigError, match=r"unknown settings in \[client\]: log\."):
        resolve({"TINKEX_CONFIG": str(file), "TINKER_BASE_URL": LOCAL})


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8642", True),
        ("http://127.4.5.6", True),
        ("http://localhost:1", True),
        ("http://[::1]:8642", True),
        ("http://127.evil.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("http://localhost.evil.example", False),
    ],
)
def test_a_host_that_begins_like_this_machine_is_another_one(url: str, is_here: bool) -> None:
    """Nobody else gets requests without a key, or past a proxy."""
    assert is_loopback(url) is is_here
