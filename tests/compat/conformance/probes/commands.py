"""Probes of the official command line, run in this process as the command itself would run it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import click.testing
import huggingface_hub
from tinker.cli.__main__ import main_cli

from tests.compat.conformance.probes.world import KEY, World, done

COMMANDS: dict[str, Callable[[World], None]] = {}


def names() -> list[str]:
    """Every command that the group has, by reflection."""
    return sorted(_leaves(main_cli, ()))


def _leaves(command: click.Command, words: tuple[str, ...]) -> list[str]:
    if not isinstance(command, click.Group):
        return [" ".join(words)]
    context = click.Context(command)
    found = []
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        found += _leaves(child, (*words, name))
    return found


def try_command(world: World, name: str) -> None:
    assert name in COMMANDS, "no probe: write one"
    COMMANDS[name](world)


def command(name: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def register(function: Callable[[World], None]) -> Callable[[World], None]:
        COMMANDS[name] = function
        return function

    return register


def run(*words: str, given: str | None = None) -> str:
    """What the command printed. Raises what it raised."""
    result = click.testing.CliRunner().invoke(main_cli, words, input=given)
    if result.exception is not None:
        details = getattr(result.exception, "details", "") or result.output
        raise RuntimeError(f"{result.exception} {details}")
    return str(result.stdout)


def run_json(*words: str) -> Any:
    return json.loads(run("--format", "json", *words))


@command("version")
def version(world: World) -> None:
    assert world.T.__version__ in run("version")


# -- credentials: the home folder is the probe's own -------------------------------------------------------------------


@command("auth login")
@command("auth logout")
def login_and_logout(world: World) -> None:
    said = run("auth", "login", given=f"{KEY}\n")
    assert "Logged in as local" in said and KEY not in said, said
    assert "Removed credential" in run("auth", "logout")


@command("auth status")
def status(world: World) -> None:
    assert "Tinker accessible: yes" in run("auth", "status")


@command("auth whoami")
def whoami(world: World) -> None:
    assert run_json("auth", "whoami")["user_urn"] == "tml:user:local"


# -- runs, models, sessions --------------------------------------------------------------------------------------------


@command("run list")
def run_list(world: World) -> None:
    assert world.run_id in {run["training_run_id"] for run in run_json("run", "list", "--limit", "0")["runs"]}
    assert "training run" in run("run", "list", "--limit", "1")


@command("run info")
def run_info(world: World) -> None:
    assert run_json("run", "info", world.run_id)["base_model"] == world.model


@command("model list")
def model_list(world: World) -> None:
    assert world.model in json.dumps(run_json("model", "list")) and world.model in run("model", "list", "tiny")


@command("session export-trace")
def export_trace(world: World) -> None:
    assert run("session", "export-trace", world.session_id, "--url-only").startswith("http")


@command("billing usage")
def billing_usage(world: World) -> None:
    run_json("billing", "usage", "2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z")


@command("billing checkpoint-storage")
def checkpoint_storage(world: World) -> None:
    assert world.state and "checkpoint_count" in json.dumps(run_json("billing", "checkpoint-storage"))


# -- checkpoints -------------------------------------------------------------------------------------------------------


@command("checkpoint list")
def checkpoint_list(world: World) -> None:
    for words in (("--limit", "0"), ("--run-id", world.run_id)):
        listed = run_json("checkpoint", "list", *words)["checkpoints"]
        assert world.state in {row["tinker_path"] for row in listed}, listed


@command("checkpoint info")
def checkpoint_info(world: World) -> None:
    assert world.state in json.dumps(run_json("checkpoint", "info", world.state))


@command("checkpoint publish")
@command("checkpoint unpublish")
def publish(world: World) -> None:
    path = world.new_state()
    run("checkpoint", "publish", path)
    assert world.checkpoint(path).public
    run("checkpoint", "unpublish", path)
    assert not world.checkpoint(path).public


@command("checkpoint set-ttl")
def set_ttl(world: World) -> None:
    path = world.new_state()
    run("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert world.checkpoint(path).expires_at is not None
    run("checkpoint", "set-ttl", path, "--remove")
    assert world.checkpoint(path).expires_at is None


@command("checkpoint delete")
def delete(world: World) -> None:
    paths = [world.new_state(), world.new_state()]
    run("checkpoint", "delete", "--yes", *paths)
    assert [world.checkpoint(path) for path in paths] == [None, None]


@command("checkpoint download")
def download(world: World) -> None:
    external = done(world.training.save_weights_external(world.name())).path
    with tempfile.TemporaryDirectory() as folder:
        for path in (world.state, external):
            run("checkpoint", "download", path, "--output", folder)
            files = Path(folder, path.removeprefix("tinker://").replace("/", "_"))
            assert json.loads((files / "adapter_config.json").read_text())["r"] == 4
            assert (files / "adapter_model.safetensors").stat().st_size > 1000


@command("checkpoint push-hf")
def push_hf(world: World) -> None:
    hub = _Hub()
    kept, kept_download = huggingface_hub.HfApi, huggingface_hub.hf_hub_download
    huggingface_hub.HfApi = lambda: hub  # type: ignore[assignment, misc]
    huggingface_hub.hf_hub_download = hub.download  # type: ignore[assignment]
    try:
        run("checkpoint", "push-hf", world.state, "--repo", "somebody/adapter")
    finally:
        huggingface_hub.HfApi, huggingface_hub.hf_hub_download = kept, kept_download  # type: ignore[misc]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= hub.pushed, hub.pushed


class _Hub:
    """Stands for the hub's own API, which is no part of the service."""

    pushed: set[str]

    def whoami(self) -> dict[str, str]:
        return {"name": "somebody"}

    def create_repo(self, **named: Any) -> None:
        pass

    def download(self, **named: Any) -> str:
        raise FileNotFoundError

    def upload_folder(self, *, folder_path: str, **named: Any) -> None:
        self.pushed = {file.name for file in Path(folder_path).iterdir()}
