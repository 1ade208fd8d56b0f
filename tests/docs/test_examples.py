"""Each example runs against a service that the environment names, and prints what it should."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.docs.conftest import OTHER_MODEL
from tests.docs.pages import ROOT
from tinkex.testing import Pending, ScriptedService, Status

EXAMPLES = {path.name[:2]: path for path in sorted((ROOT / "examples").glob("*.py"))}
Run = Callable[..., str]


@pytest.fixture
def run(variables: dict[str, str]) -> Run:
    def example(number: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, EXAMPLES[number], *arguments],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return example


def numbers_after(word: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{word} (-?[\d.]+\d)", text)]


def is_falling(numbers: list[float]) -> bool:
    return len(numbers) > 1 and all(later < sooner for sooner, later in itertools.pairwise(numbers))


def test_every_example_is_run_here() -> None:
    assert list(EXAMPLES) == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.slow
def test_the_first_fine_tune_lowers_the_loss_and_samples(run: Run, scripted: ScriptedService) -> None:
    said = run("01")
    assert is_falling(numbers_after("loss", said))
    assert re.search(r"after \[101\]: \[\d+(, \d+){6}\]", said)
    assert [op for _, _, op in scripted.executed[:4]] == ["forward_backward", "optim_step"] * 2
    assert all(session.finished for session in scripted.sessions.values())


@pytest.mark.slow
def test_an_example_takes_another_model_as_its_argument(run: Run, scripted: ScriptedService) -> None:
    run("05", OTHER_MODEL)
    assert [sampler.base_model for sampler in scripted.samplers.values()] == [OTHER_MODEL]


@pytest.mark.slow
def test_many_samples_outlast_a_service_that_says_slow_down(run: Run, scripted: ScriptedService) -> None:
    scripted.script.on("asample", times=5, do=Status(429, headers={"retry-after-ms": "20"}))
    said = run("02")
    assert "200 of 200 prompts answered, 6400 tokens" in said
    assert "told to slow down 5 times" in said
    # The two pools that the example narrows, and a handful for the session and the rest.
    assert scripted.peak_connections <= 16 + 64 + 10


@pytest.mark.slow
def test_the_custom_loss_prefers_the_chosen_answers_more_and_more(run: Run) -> None:
    said = run("03")
    assert is_falling(numbers_after("loss", said))
    assert numbers_after("accuracy", said)[-1] == 1.0


@pytest.mark.slow
def test_checkpoints_are_saved_resumed_listed_and_deleted(run: Run, scripted: ScriptedService) -> None:
    said = run("04")
    assert is_falling(numbers_after("loss", said))
    assert "weights/after-step-1 (training) is kept for good" in said
    assert re.search(r"sampler_weights/after-step-1 \(sampler\) is kept until \d{4}-\d\d-\d\d", said)
    assert "0 checkpoints left" in said
    resumed = next(request for request in scripted.requests if request.endpoint == "load_weights")
    assert resumed.json["optimizer"] is True


@pytest.mark.slow
def test_a_stream_prints_the_tokens_of_the_whole_answer(run: Run, scripted: ScriptedService) -> None:
    said = run("05")
    assert re.match(r"(\d+ ){12} \(length\)\n12 tokens, mean log-probability -\d", said)
    assert len(scripted.requests_to("sample_stream")) == 1


@pytest.mark.slow
def test_watching_tells_waits_retries_and_where_the_time_went(run: Run, scripted: ScriptedService) -> None:
    scripted.script.on("create_model", nth=1, do=Status(503, headers={"retry-after-ms": "20"}))
    scripted.script.on("forward_backward", nth=1, do=Pending("paused_capacity", "no room now", times=2))
    said = run("06")
    assert re.search(r"still (queued|submitting|accepted)", said)
    assert "done after 3 polls" in said
    assert "1 retries" in said
    assert "create_model: attempt 1 failed, the next came 0.02 s later" in said
    assert "the queue was paused_capacity: no room now" in said
    assert re.search(r"forward_backward: \d\.\d+ s = submit .* \+ queue .* \+ compute .* \+ fetch", said)
