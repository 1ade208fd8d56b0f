"""`tinkex run watch`, against the scripted service. With a real run: test_live.py."""

from __future__ import annotations

import datetime as dt
import json
import signal
from typing import Any

import pytest

import tinkex
from tinkex.cli.commands.run import line_of, lines_of
from tinkex.testing import ScriptedService, Status
from tinkex.types import RunStep

from .conftest import KEY, Saved, Tinkex, start
from .typed_command import Terminal

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def train(service: ScriptedService, steps: int = 3) -> str:
    """A run with so many steps; its id."""
    datum = tinkex.Datum(tinkex.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    with tinkex.ServiceClient(base_url=service.url, api_key=KEY, telemetry=False) as client:
        training = client.create_lora_training_client("tinkex/tiny", rank=8)
        for _ in range(steps):
            training.forward_backward([datum], "cross_entropy")
            done = training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
        done.result()
        return training.model_id


def test_without_a_terminal_every_step_is_a_line(run: Tinkex, service: ScriptedService) -> None:
    run_id = train(service)
    ran = run("run", "watch", run_id, "--until-idle", "--idle-for", "0")
    lines = ran.out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 2", "step 3"]
    assert "loss " in lines[0]
    assert ran.err == f"Run {run_id}. Ctrl-C stops watching; the run continues.\n"


def test_as_json_every_step_is_an_object_on_a_line(run: Tinkex, service: ScriptedService) -> None:
    run_id = train(service)
    ran = run("run", "watch", run_id, "--until-idle", "--idle-for", "0", "-o", "json")
    steps = [json.loads(line) for line in ran.out.splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["seq_id"] for step in steps] == sorted(step["seq_id"] for step in steps)
    assert ran.err == ""


def test_a_run_can_be_named_by_path_or_latest(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    run_id = train(service, 1)
    flags = ("--until-idle", "--idle-for", "0")
    assert run("run", "watch", "latest", *flags).err.startswith(f"Run {run_id}.")
    ran = run("run", "watch", saved.sampler, *flags)
    assert ran.err == f"Run {saved.run_id}. Ctrl-C stops watching; the run continues.\nThe run has no steps.\n"


def test_no_run_and_a_wrong_id_are_reported(run: Tinkex, service: ScriptedService) -> None:
    assert run("run", "watch", "latest").err.startswith("tinkex: There is no training run yet.")
    ran = run("run", "watch", "nobody")
    assert (ran.code, ran.err) == (1, "tinkex: Not found (HTTP 404: training run 'nobody' is not known).\n")


def test_a_service_without_steps_is_one_sentence(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    service.script.on("run_steps", do=Status(404, "no such call"))
    ran = run("run", "watch", saved.run_id)
    assert ran.code == 1
    assert ran.err.startswith("tinkex: This service does not report the steps of a run")
    assert f"tinkex run info {saved.run_id}" in ran.err


def test_it_follows_until_ctrl_c(service: ScriptedService) -> None:
    run_id = train(service, 2)
    watching = start("run", "watch", run_id)
    assert watching.stdout is not None
    assert [watching.stdout.readline()[:6] for _ in range(2)] == ["step 1", "step 2"]
    model = service.models[run_id]
    model.steps.append({**model.steps[-1], "seq_id": model.steps[-1]["seq_id"] + 2})
    assert watching.stdout.readline().startswith("step 3")
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=10)
    assert watching.returncode == 130 and "Traceback" not in err


def test_a_tall_terminal_shows_the_curve_and_one_line(service: ScriptedService) -> None:
    run_id = train(service)
    with Terminal("run", "watch", run_id, "--until-idle", "--idle-for", "1", rows=30) as terminal:
        assert terminal.end() == 0
    picture = terminal.text.split("loss\n")[-1]
    assert "┤" in picture and "└──" in picture
    assert picture.count("step 3  loss") == 1 and "idle, last step" in picture


def test_a_low_terminal_shows_only_the_line(service: ScriptedService) -> None:
    run_id = train(service)
    with Terminal("run", "watch", run_id, "--until-idle", "--idle-for", "1", rows=10) as terminal:
        assert terminal.end() == 0
    assert "step 3  loss" in terminal.text and "┤" not in terminal.text


def step(**about: Any) -> RunStep:
    return RunStep(seq_id=2, time=NOW, **about)


@pytest.mark.parametrize(
    ("about", "line"),
    [
        ({}, "step 7  loss –"),
        (
            {"loss": 1.23456, "learning_rate": 1e-4, "tokens": 5000, "seconds": 2.0},
            "step 7  loss 1.2346  learning rate 0.0001  2,500 tokens/s",
        ),
        ({"loss": 1.0, "evaluation_loss": 2.0, "tokens": 5}, "step 7  loss 1.0000  evaluation 2.0000"),
    ],
)
def test_a_line_shows_the_known_values(about: dict[str, Any], line: str) -> None:
    assert line_of(7, step(**about)) == line


def test_before_the_first_step_it_says_what_it_is_waiting_for() -> None:
    assert lines_of([], 80, 24, encoding="utf-8", is_active=True) == ["No step yet: waiting for the first optim_step."]
