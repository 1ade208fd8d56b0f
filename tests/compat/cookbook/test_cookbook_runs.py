"""tinker-cookbook 0.5.8, unmodified, trains on this service: with the official client and through our alias.

`make cookbook-runs` prints the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tests.compat.as_tinker import cookbook_imports
from tests.compat.cookbook import environment
from tests.compat.cookbook.environment import CLIENTS, Run
from tests.integration.service.live import LiveServer

TINY, SMOLLM2 = "tinkex/tiny", "HuggingFaceTB/SmolLM2-135M-Instruct"
pytestmark = [pytest.mark.full, pytest.mark.parametrize("client", CLIENTS)]


@pytest.fixture(scope="module")
def python() -> Path:
    return cookbook_imports.python_of(environment.PLACE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    place = tmp_path_factory.mktemp("cookbook") / "data"
    # One thread: on a busy machine, two that wait for each other are slower by far.
    with LiveServer(place, "--threads", "1", models=(TINY, SMOLLM2)) as live:
        yield live


def test_cookbook_supervised_training_lowers_the_loss(
    python: Path, server: LiveServer, client: str, tmp_path: Path
) -> None:
    run = environment.run(python, client, "supervised.py", server.url, SMOLLM2, tmp_path)
    assert run.code == 0, run.output[-5000:]
    train, test = run.series("train_mean_nll"), run.series("test/nll")
    print(f"\n{client}, supervised: train_mean_nll {_digits(train)}, test/nll {_digits(test)}")
    assert len(train) == len(test) == 5
    assert train[-1] < 0.7 * train[0]
    # Held-out conversations, scored by a sampler before each step.
    assert test == sorted(test, reverse=True)
    _assert_no_complaint(run)
    kept = {f"weights/{name}" for name in ("000002", "000004", "final")}
    assert _checkpoints(server, run) == kept | {f"sampler_{name}" for name in kept}, "rolling ones are deleted"


def test_an_interrupted_supervised_run_resumes_from_its_last_checkpoint(
    python: Path, server: LiveServer, client: str, tmp_path: Path
) -> None:
    arguments = ("supervised.py", server.url, TINY, tmp_path, "--learning-rate", "0.01", "--max-length", "256")
    cut = environment.run(python, client, *arguments, "--cut-before", "4")
    assert cut.code == 1 and "the power is cut" in cut.output
    assert cut.series("step") == [0, 1, 2]
    last, before = cut.checkpoints[-1]["state_path"], cut.series("step:max")
    run = environment.run(python, client, *arguments)
    assert run.code == 0, run.output[-5000:]
    print(f"\n{client}, cut before step 4: test/nll {_digits(run.series('test/nll'))}")
    assert f"Resumed training from {last}" in run.output
    assert "Renderer metadata matches" in run.output
    assert run.series("step") == [0, 1, 2, 2, 3, 4]
    # The optimizer came along. The cookbook had sent step 3 before it saved after step 2.
    assert run.series("step:max") == [*before, 5, 6, 7]
    test = run.series("test/nll")
    assert test == sorted(test, reverse=True)
    _assert_no_complaint(run)


def test_cookbook_rl_training_takes_three_steps_and_a_second_start_finds_it_done(
    python: Path, server: LiveServer, client: str, tmp_path: Path
) -> None:
    run = environment.run(python, client, "rl.py", server.url, SMOLLM2, tmp_path)
    assert run.code == 0, run.output[-5000:]
    rewards = run.series("env/all/reward/total")
    print(f"\n{client}, rl: reward {_digits(rewards)}, entropy {_digits(run.series('optim/entropy'))}")
    _assert_three_on_policy_steps(run)
    _assert_no_complaint(run)
    assert run.checkpoints[-1]["name"] == "final"
    assert "weights/000002" not in _checkpoints(server, run), "rolling ones are deleted"
    again = environment.run(python, client, "rl.py", server.url, SMOLLM2, tmp_path)
    assert again.code == 0, again.output[-5000:]
    assert "Training was already complete" in again.output


def test_cookbook_rl_training_streams_minibatches(
    python: Path, server: LiveServer, client: str, tmp_path: Path
) -> None:
    run = environment.run(python, client, "rl.py", server.url, TINY, tmp_path, "--mode", "stream", "--loss", "ppo")
    assert run.code == 0, run.output[-5000:]
    _assert_three_on_policy_steps(run)
    _assert_no_complaint(run)


def test_cookbook_rl_training_runs_off_policy(python: Path, server: LiveServer, client: str, tmp_path: Path) -> None:
    run = environment.run(python, client, "rl.py", server.url, TINY, tmp_path, "--mode", "async")
    assert run.code == 0, run.output[-5000:]
    # The cookbook's loop ends with its queue, and may not log the last step.
    assert run.series("training_client/step")[:2] == [0, 1]
    assert run.checkpoints[-1]["name"] == "final"
    _assert_no_complaint(run)


def _assert_three_on_policy_steps(run: Run) -> None:
    rewards = run.series("env/all/reward/total")
    assert len(rewards) == 3 and all(0 < reward < 1 for reward in rewards)
    # What sampled and what is trained give the same log-probabilities; half the mean square of the difference.
    assert max(run.series("optim/kl_sample_train_v2")) < 0.5 * 1e-3**2
    # Before the first step the policy is the base model, and every step moves it.
    assert abs(run.series("kl_policy_base")[0]) < 1e-3 < abs(run.series("kl_policy_base")[-1])
    assert all(moved > 1e-6 for moved in run.series("kl_pre_post_v2"))
    assert len(run.series("test/env/all/reward/total")) == 3


def _assert_no_complaint(run: Run) -> None:
    """The cookbook only logs it when a rolling save, a deletion or a look-up fails, and goes on."""
    found = [line for line in run.output.splitlines() if "WARNING" in line or "ERROR" in line]
    assert found == []


def _checkpoints(server: LiveServer, run: Run) -> set[str]:
    """Those of the run that the service still has, as `weights/name`."""
    model_id = run.checkpoints[-1]["state_path"].removeprefix("tinker://").partition("/")[0]
    with tinkex.ServiceClient(base_url=server.url, api_key="tml-cookbook") as service:
        listed = service.create_rest_client().list_checkpoints(model_id).result()
    return {checkpoint.checkpoint_id for checkpoint in listed.checkpoints}


def _digits(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
