"""What is drawn of a run is what the user's program computed: losses, failures, metrics, samples. A real service."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

import tinkex
from tests.integration.service.live import LiveServer

STEP = tinkex.AdamParams(learning_rate=5e-3)


def preference(sign: float, *tokens: int) -> tinkex.Datum:
    """One answer of a pair. `sign` says whether it is the chosen one."""
    inputs: dict[str, Any] = {"target_tokens": list(tokens[1:]), "weights": [0.0] + [1.0] * (len(tokens) - 2)}
    return tinkex.Datum(tinkex.ModelInput.from_ints(list(tokens[:-1])), {**inputs, "sign": [sign] * (len(tokens) - 1)})


PAIRS = [preference(1.0, 5, 6, 7, 8, 9), preference(-1.0, 5, 6, 9, 8, 7)]


def plain(datum: tinkex.Datum) -> tinkex.Datum:
    """The datum without what only the loss above reads."""
    return tinkex.Datum(datum.model_input, {name: datum.loss_fn_inputs[name] for name in ("target_tokens", "weights")})


def dpo(data: list[tinkex.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    gains = [
        (datum.loss_fn_inputs["sign"].to_torch() * found).sum() for datum, found in zip(data, logprobs, strict=True)
    ]
    margin = torch.stack(gains).sum()
    return -torch.nn.functional.logsigmoid(margin), {"margin": float(margin.detach()), "not_a_number": math.nan}


def steps_of(service: tinkex.ServiceClient, run_id: str) -> list[tinkex.types.RunStep]:
    return service.create_rest_client().get_run_steps(run_id).result().steps


def watched(live: LiveServer, run_id: str) -> list[dict[str, Any]]:
    """What `tinkex run watch` writes about a run that has ended."""
    words = [sys.executable, "-m", "tinkex", "run", "watch", run_id, "--until-idle", "--idle-for", "0", "-o", "json"]
    words += ["--base-url", live.url, "--api-key", "tml-test"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.slow
def test_the_loss_of_a_custom_loss_step_is_what_the_function_returned(
    live: LiveServer, service: tinkex.ServiceClient
) -> None:
    """Number by number: as the program printed it, in /steps, in `run watch` and in `tinkex.progress`."""
    training = service.create_lora_training_client("tinkex/tiny", rank=8)
    printed: list[tuple[float | None, float]] = []
    with tinkex.progress(training, 5) as progress:
        for _ in progress:
            done = training.forward_backward_custom(PAIRS, dpo)
            training.optim_step(STEP)
            printed.append((done.result().loss, done.result().metrics["margin"]))
    told = steps_of(service, training.model_id)
    assert printed[-1][0] < 0.5 * printed[0][0]  # type: ignore[operator]  # it was learned, or the test says little
    assert [(step.loss, step.metrics["margin"]) for step in told] == printed
    assert [step.metrics["loss:sum"] for step in told] == [loss for loss, _ in printed]
    assert [record.loss for record in progress.history] == [loss for loss, _ in printed]
    assert [step["loss"] for step in watched(live, training.model_id)] == [loss for loss, _ in printed]
    assert {step.evaluation_loss for step in told} == {None}
    assert all("not_a_number" not in step.metrics and "weight:sum" not in step.metrics for step in told)


@pytest.mark.slow
def test_a_custom_loss_in_several_chunks_counts_once(
    service: tinkex.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = service.create_lora_training_client("tinkex/tiny", rank=8)
    monkeypatch.setattr(training, "_split", lambda data: [[datum] for datum in data])
    result = training.forward_backward_custom(PAIRS, dpo)
    training.optim_step(STEP).result()
    [step] = steps_of(service, training.model_id)
    assert (step.loss, step.evaluation_loss, step.tokens) == (result.result().loss, None, 16)


@pytest.mark.slow
def test_the_surrogate_of_a_client_that_sends_no_header_is_drawn_as_nothing(service: tinkex.ServiceClient) -> None:
    """The official client: a forward, then a forward_backward of the same data with gradients as weights."""
    training = service.create_lora_training_client("tinkex/tiny", rank=8)
    data = [plain(datum) for datum in PAIRS]
    for gradient in ([0.5] * 4, [0.5, 0.5, -0.25, 0.5]):
        training.forward(data, "cross_entropy")
        weighted = [
            tinkex.Datum(
                datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": gradient}
            )
            for datum in data
        ]
        training.forward_backward(weighted, "cross_entropy")
        training.optim_step(STEP)
    # Evaluated before it is trained on, with the same weights: both numbers are right.
    evaluated = training.forward(data, "cross_entropy")
    trained = training.forward_backward(data, "cross_entropy")
    training.optim_step(STEP).result()
    first, second, third = steps_of(service, training.model_id)
    assert [(step.loss, step.evaluation_loss) for step in (first, second)] == [(None, None)] * 2
    assert third.evaluation_loss == pytest.approx(evaluated.result().metrics["loss:sum"] / 6)
    assert third.loss == pytest.approx(trained.result().metrics["loss:sum"] / 6)


@pytest.mark.slow
def test_what_a_program_logs_reaches_the_service_and_the_file_in_order(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client("tinkex/tiny", rank=8)
    file = io.StringIO()
    with tinkex.progress(training, 3, file=file) as progress:
        for step in progress:
            training.forward_backward([plain(PAIRS[0])], "cross_entropy")
            training.optim_step(STEP)
            progress.log({"reward/mean": step / 10}, kl=math.nan)
            progress.sample("2+2=", "4 ☃", 1.0, group=step)
            progress.note(noted=step)
    rest = service.create_rest_client()
    found = rest.get_run_metrics(training.model_id).result()
    numbers = [{"reward/mean": n / 10, "kl": None} if not k else {"noted": float(n)} for n in range(3) for k in (0, 1)]
    assert [entry.metrics for entry in found.entries] == numbers
    assert [entry.step for entry in found.entries] == [1, 1, 2, 2, 3, 3]
    assert [entry.seq_id for entry in found.entries] == [2, 2, 4, 4, 6, 6]
    assert [entry.number for entry in found.entries] == [1, 2, 3, 4, 5, 6] and found.next == 6
    assert [entry.number for entry in rest.get_run_metrics(training.model_id, 4, 1).result().entries] == [5]
    samples = rest.get_run_samples(training.model_id).result().samples
    assert [(one.step, one.prompt, one.text, one.reward, one.metadata) for one in samples] == [
        (number + 1, "2+2=", "4 ☃", 1.0, {"group": number}) for number in range(3)
    ]
    assert progress.metrics_file is not None
    lines = [json.loads(line) for line in progress.metrics_file.read_text(encoding="utf-8").splitlines()]
    assert [line["metrics"] for line in lines if line["kind"] == "metrics"] == numbers
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert losses == [step.loss for step in steps_of(service, training.model_id)]
    assert "loss per token" in file.getvalue() and "reward/mean 0.00 → 0.200" in file.getvalue()
    history = [json.loads(line) for line in rest.get_run_history(training.model_id, "jsonl").result().splitlines()]
    assert [row["loss"] for row in history if row["kind"] == "step"] == losses
    assert [row["metrics"] for row in history if row["kind"] == "metrics"] == numbers
    table = list(csv.DictReader(io.StringIO(rest.get_run_history(training.model_id).result())))
    assert [float(row["metrics.noted"]) for row in table if row["metrics.noted"]] == [0.0, 1.0, 2.0]
    assert [float(row["loss"]) for row in table if row["kind"] == "step"] == losses


@pytest.mark.slow
def test_a_step_that_failed_is_a_failed_step_everywhere_and_ends_the_loop(
    live: LiveServer, service: tinkex.ServiceClient
) -> None:
    """ux.md A5: every step of the loop failed, and the program ended with "8 steps" and exit code 0."""
    training = service.create_lora_training_client("tinkex/tiny", rank=8)
    unknown = tinkex.Datum(tinkex.ModelInput.from_ints([10**6]), {"target_tokens": [1], "weights": [1.0]})
    file = io.StringIO()
    raised = pytest.raises(tinkex.BadRequestError, match=r"1,?000,?000")
    with raised as caught, tinkex.progress(training, 8, file=file) as progress:
        for _ in progress:
            training.forward_backward([unknown], "cross_entropy")
            training.optim_step(STEP).result()
    assert progress.stopped_by == "failed" and "on_failure='show'" in "".join(caught.value.__notes__)
    assert file.getvalue().startswith("stopped in step 1 of 8 by BadRequestError · 1 failed: forward_backward: ")
    [step] = steps_of(service, training.model_id)
    assert (step.failed, step.loss) == (1, None) and step.failure.startswith("forward_backward: ")
    [record], [line] = progress.history, watched(live, training.model_id)
    assert (record.failed, line["failed"]) == (1, 1)
    assert [one.state for one in service.create_rest_client().list_failed_operations(1).result().operations] == [
        "refused"
    ]
