"""`models`, `console`, `chat` and `run watch` against a real service with a real, tiny model."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import tinkex
from tests.integration.service.live import LiveServer

from .conftest import Tinkex
from .typed_command import Terminal

STEPS = 4


class Trained(NamedTuple):
    run_id: str
    sampler: str
    losses: list[float | None]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("live") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def trained(live: LiveServer) -> Trained:
    tokens = list(b"hello, world")
    datum = tinkex.Datum(
        tinkex.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    )
    with tinkex.ServiceClient(base_url=live.url, telemetry=False) as service:
        training = service.create_lora_training_client("tinkex/tiny", rank=4)
        losses = []
        for _ in range(STEPS):
            losses.append(training.forward_backward([datum], "cross_entropy").result().loss)
            training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
        path = training.save_weights_for_sampler("final").result().path
        return Trained(training.model_id, path, losses)


@pytest.fixture(autouse=True)
def address(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", live.url)


@pytest.fixture
def ask(run: Tinkex, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """One message on stdin; the answer as JSON."""

    def call(text: str, *words: str) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return run("chat", *words, "-o", "json").json

    return call


def test_models_and_console_of_a_live_service(run: Tinkex, live: LiveServer) -> None:
    row = run("models", "list").out.splitlines()[1]
    assert row.split() == ["tinkex/tiny", "–", "2,048", "train,", "sample", "built-in"]
    assert run("console", "--no-browser").out == f"{live.url}/\n"


def test_the_same_seed_gives_the_same_reply_and_an_adapter_another(trained: Trained, ask: Callable[..., Any]) -> None:
    words = ("--max-tokens", "12", "--seed", "3")
    base = ask("Who are you?", "tinkex/tiny", *words)
    assert base["answer"] and base == ask("Who are you?", *words)
    adapter = ask("Who are you?", "latest", *words)
    assert adapter["model"] == trained.sampler
    assert adapter["answer"] != base["answer"]
    assert ask("Who are you?", trained.sampler, *words) == adapter


def test_ctrl_c_stops_the_reply_on_both_sides_and_the_chat_continues(trained: Trained) -> None:
    with (
        tinkex.ServiceClient(telemetry=False) as service,
        Terminal("chat", "--temperature", "0", "--max-tokens", "1900") as terminal,
    ):
        rest = service.create_rest_client()
        terminal.wait_for("`tinkex chat latest` uses your newest checkpoint.")
        terminal.wait_for("> ")
        terminal.type("Hi\n")
        terminal.wait_for("Hi\n")
        while rest.get_service_state().result().running_samples == 0:
            time.sleep(0.005)
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        end = time.monotonic() + 10
        while rest.get_service_state().result().running_samples and time.monotonic() < end:
            time.sleep(0.01)
        assert rest.get_service_state().result().running_samples == 0
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0


def test_watch_shows_the_same_losses_as_the_loop(run: Tinkex, trained: Trained) -> None:
    ran = run("run", "watch", trained.sampler, "--until-idle", "--idle-for", "0", "-o", "json")
    steps = [json.loads(line) for line in ran.out.splitlines()]
    assert len(steps) == STEPS and trained.losses[0] is not None
    assert steps[0]["learning_rate"] == pytest.approx(1e-2)
    assert steps[0]["loss"] == pytest.approx(trained.losses[0] / 11)  # a sum there, a mean over 11 tokens here
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[0]["seconds"] > 0


def test_a_run_is_listed_with_its_steps_and_loss_and_found_by_whatever_names_it(
    run: Tinkex, trained: Trained, ask: Callable[..., Any]
) -> None:
    """`run list` showed 44 characters of an id, and neither a name nor steps nor a loss."""
    assert run("run", "rename", trained.run_id, "hello").code == 0
    listed = run("run", "list", "hello", "-o", "json").json
    assert listed["total"] == 1 and trained.losses[-1] is not None
    found = listed["runs"][0]
    assert (found["name"], found["steps"], found["status"]) == ("hello", STEPS, "running")
    assert found["loss"] == pytest.approx(trained.losses[-1] / 11)
    short = run("run", "list", "hello").out.splitlines()[1].split()[0]
    for text in ("hello", "latest", short, trained.run_id[:8], trained.sampler):
        assert run("run", "info", text, "-o", "json").json["training_run_id"] == trained.run_id
    for text in ("hello", short):
        assert ask("Hi", text, "--max-tokens", "2", "--seed", "1")["model"] == trained.sampler
        assert run("sample", "-m", text, "--prompt-ids", "1,2", "--ids", "--max-tokens", "2").code == 0
        assert run("checkpoint", "info", text, "-o", "json").json["tinker_path"] == trained.sampler


def test_a_deleted_run_is_gone_with_its_weights_and_its_client_is_told(run: Tinkex, live: LiveServer) -> None:
    """No command deleted a run: 56 that nobody wanted stayed."""
    with tinkex.ServiceClient(base_url=live.url, telemetry=False, display_name="the session") as service:
        training = service.create_lora_training_client("tinkex/tiny", rank=4)
        named = service.create_lora_training_client("tinkex/tiny", rank=4, name="keep me", tags=["good", "sft"])
        path = training.save_weights_for_sampler("final").result().path
        found = run("run", "info", training.model_id, "-o", "json").json
        assert (found["name"], found["tags"]) == ("the session", [])
        refused = run("run", "delete", "the session", "-y")
        assert refused.code == 1 and path in refused.err and "With --force" in refused.err
        deleted = run("run", "delete", "the session", "-y", "--force")
        assert deleted.out == f"Deleted {training.model_id} and 1 checkpoint.\n"
        with pytest.raises(tinkex.NotFoundError, match="is not known"):
            training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
        assert run("run", "list", "--tag", "good", "-o", "json").json["runs"][0]["name"] == "keep me"
        assert run("run", "list", "session", "-o", "json").json["total"] == 0
        assert "is not known" in run("checkpoint", "info", path).err
        named.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
