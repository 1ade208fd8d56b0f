"""`tinkex serve` as a process: what it says when it is ready, how it stops, and what it refuses in one sentence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex

from .conftest import Tinkex, start

KEY = "tml-a-key-of-this-service"


class Running:
    """A `tinkex serve` on the tiny model."""

    def __init__(self, data_dir: Path, *words: str, **options: Any) -> None:
        self.data_dir = data_dir
        self.process = start(
            *("-o", "json", "serve", "--base-model", "tinkex/tiny", "--port", "0", "--threads", "1"),
            *("--data-dir", str(data_dir), *words),
            **options,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.ready = json.loads(line)
        self.url: str = self.ready["url"]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts services; none outlives the test."""
    made: list[Running] = []

    def serve(*words: str, **options: Any) -> Running:
        made.append(Running(options.pop("data_dir", tmp_path / "data"), *words, **options))
        return made[-1]

    yield serve
    for running in made:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()


@pytest.mark.slow
def test_a_service_is_ready_when_it_says_so_keeps_its_folders_private_and_ends_on_sigterm(
    serving: Callable[..., Running], run: Tinkex, tmp_path: Path
) -> None:
    running = serving()
    assert running.ready["models"] == ["tinkex/tiny"]
    assert running.ready["pid"] == running.process.pid
    with tinkex.ServiceClient(base_url=running.url, telemetry=False) as client:
        names = [model.model_name for model in client.get_server_capabilities().supported_models]
        assert "tinkex/tiny" in names
        training = client.create_lora_training_client("tinkex/tiny", rank=4)
        path = training.save_state("kept").result().path

    # The port and the data folder are taken.
    port = running.url.rpartition(":")[2]
    refused = run("serve", "--base-model", "tinkex/tiny", "--port", port, "--data-dir", str(tmp_path / "other"))
    assert refused.code == 1
    assert port in refused.err and "--port" in refused.err and "Traceback" not in refused.err
    refused = run("serve", "--base-model", "tinkex/tiny", "--port", "0", "--data-dir", str(running.data_dir))
    assert refused.code == 1
    assert str(running.process.pid) in refused.err and "--data-dir" in refused.err

    # Other commands work on its data meanwhile.
    assert run("gc", "--data-dir", str(running.data_dir), "-o", "json").json["removed"] == []
    saved = run("backup", str(tmp_path / "backup"), "--data-dir", str(running.data_dir), "-o", "json")
    assert saved.json["things"] >= 1
    code, said = running.stop()
    assert code == 0, said
    assert "Traceback" not in said

    # The backup is a data folder.
    again = serving(data_dir=tmp_path / "backup")
    with tinkex.ServiceClient(base_url=again.url, telemetry=False) as client:
        listed = client.create_rest_client().list_user_checkpoints().result().checkpoints
        assert [saved.tinker_path for saved in listed] == [path]
        assert client.create_training_client_from_state(path).get_info().lora_rank == 4
    assert again.stop(signal.SIGINT)[0] == 0


@pytest.mark.slow
def test_address_and_client_settings_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_API_KEY", KEY)
    process = start("serve", "--base-model", "tinkex/tiny", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert process.stdout is not None
    lines: list[str] = []
    try:
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read() if process.stderr else ""
    finally:
        process.terminate()
        _, said = process.communicate(timeout=60)
    text = "".join(lines)
    url = next(line.split()[1] for line in lines if line.strip().startswith("at "))
    assert f"TINKER_BASE_URL={url} TINKER_API_KEY=tml-" in text
    assert f'tinkex.ServiceClient(base_url="{url}", api_key="tml-…")' in text
    assert "tinkex/tiny" in text and str(tmp_path / "data") in text
    assert KEY not in text and KEY not in said


def test_a_taken_port_is_one_sentence(run: Tinkex, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = run("serve", "--port", str(port), "--data-dir", str(tmp_path / "data"))
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1 and str(port) in ran.err and "--port" in ran.err


def test_listening_on_other_addresses_without_keys_is_rejected(run: Tinkex, tmp_path: Path) -> None:
    ran = run("serve", "--host", "0.0.0.0", "--port", "0", "--base-model", "tinkex/tiny", "--data-dir", str(tmp_path))
    assert ran.code == 1
    assert "tinkex key create" in ran.err


def test_an_unknown_model_is_one_sentence(run: Tinkex, tmp_path: Path) -> None:
    ran = run("serve", "--port", "0", "--base-model", "./no/such/folder", "--data-dir", str(tmp_path))
    assert ran.code == 1
    assert "./no/such/folder" in ran.err and "Traceback" not in ran.err


def test_a_missing_extra_names_the_command_that_installs_it(tmp_path: Path) -> None:
    without = "import sys; sys.modules['torch'] = None; sys.path_importer_cache.clear()\n"
    code = without + (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        f"from tinkex.cli.main import main; sys.exit(main(['serve', '--data-dir', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "tinkex: tinkex serve needs the extra `local`, which is not installed. Install it with: "
        "pip install 'tinkex[local]' (in a clone of the repository: pip install -e '.[local]')"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "http"], "argument --port: must be a whole number from 0 to 65535"),
        (["--device", "tpu"], "argument --device: must be auto, cpu, cuda, cuda:N or mps"),
        (["--api-key", "sk-hush-hush"], "argument --api-key: must be keys that start with tml-"),
        (["--drain-s", "-1"], "argument --drain-s: must be seconds from 0"),
    ],
)
def test_an_invalid_flag_is_reported_with_advice_and_without_secrets(run: Tinkex, words: list[str], said: str) -> None:
    ran = run("serve", *words)
    assert ran.code == 2
    assert said in ran.err
    assert "hush" not in ran.err


def test_settings_of_the_environment_reach_the_service(
    run: Tinkex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TINKEX_MAX_ROWS", "many")
    ran = run("serve", "--port", "0")
    assert ran.code == 1
    assert ran.err == "tinkex: TINKEX_MAX_ROWS must be a whole number from 1, not 'many'.\n"
    assert not (tmp_path / "data").exists()


def test_without_a_terminal_a_service_never_waits_for_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinkex", "serve", "--host", "0.0.0.0", "--base-model", "tinkex/tiny", "--port", "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "TINKEX_DATA_DIR": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "key" in done.stderr


def test_a_private_service_ends_with_a_program_that_read_its_log(tmp_path: Path) -> None:
    """Its last message went to a closed pipe: the error ended the thread that was to stop the service."""
    words = ("--base-model", "tinkex/tiny", "--port", "0", "--data-dir", str(tmp_path / "data"))
    process = start("serve", "--private", str(tmp_path / "private"), *words, stdin=subprocess.PIPE)
    assert process.stderr is not None and process.stdin is not None
    process.stderr.close()
    process.stdin.close()
    assert process.wait(60) == 0
