"""Two runners, one contract: which model gets which, and that both give the same numbers in every family.

Tolerance 1e-4: small models in float32, sums in another order.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import oracle
from tests.unit.engine.architectures import CPU, PACKED, saved
from tests.unit.engine.oracle import Session, assert_alike, both, datum, randomise
from tests.unit.engine.sampling_oracle import answer, spec
from tinkex.engine import runner_choice
from tinkex.engine.contract import pass_frame, read_outputs
from tinkex.engine.models.loaded_model import Model, load
from tinkex.engine.packed import head, lora_train
from tinkex.engine.packed.runner import PackedRunner
from tinkex.engine.training.general_runner import GeneralRunner

GENERAL: dict[str, tuple[dict[str, Any], str]] = {
    "Mistral": ({"sliding_window": 4}, "the last 4 tokens"),
    "Gemma3Text": ({}, "its family"),
    "Llama": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "depend on the length",
    ),
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_llama_shaped_model_runs_packed_and_equals_the_general_runner(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(saved(tmp_path, kind, **PACKED[kind]), CPU, torch.float32)
    assert isinstance(runner_choice.choose_runner(model), PackedRunner)
    assert_alike(both(model, monkeypatch))
    asked = spec([3, 5, 7, 9] * 5, base=model.info.name, num_samples=3, max_tokens=8, seed=1)
    samples = []
    for name in ("auto", "general"):
        monkeypatch.setattr(oracle, "RUNNER", name)
        samples.append(answer(model, asked))
    for one, other in zip(samples[0].sequences, samples[1].sequences, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", GENERAL)
def test_any_other_model_gets_the_general_runner_and_the_log_says_why(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, reason = GENERAL[kind]
    model = load(saved(tmp_path, kind, **settings), CPU, torch.float32)
    with caplog.at_level(logging.INFO, "tinkex.engine"):
        assert isinstance(runner_choice.choose_runner(model), GeneralRunner)
    assert reason in caplog.text


def test_a_model_whose_packed_numbers_are_wrong_gets_the_general_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(saved(tmp_path, "Llama"), CPU, torch.float32)
    monkeypatch.setattr(PackedRunner, "hidden", lambda self, tokens_T: model.hidden(tokens_T[None])[0] * 1.01)
    with caplog.at_level(logging.INFO, "tinkex.engine"):
        assert isinstance(runner_choice.choose_runner(model), GeneralRunner)
    assert "differ by" in caplog.text


@pytest.mark.parametrize(
    ("loss_fn", "inputs"),
    [
        ("cross_entropy", {"weights": 0.5}),
        ("ppo", {"logprobs": -4.0, "advantages": 1.0}),
        ("gspo", {"logprobs": -4.5, "advantages": 1.0}),
    ],
)
def test_datums_longer_than_a_chunk_of_logits_have_the_same_gradient(
    tiny: Model, loss_fn: str, inputs: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "MOST_ROWS", 8)
    assert_alike(both(tiny, monkeypatch, loss_fn, **inputs))


def test_a_merged_adapter_has_the_same_gradient(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_train, "MERGE_FROM", 1)
    assert_alike(both(tiny, monkeypatch))


@pytest.mark.parametrize("kept_bytes", [0, 40_000])
def test_layers_over_the_budget_are_computed_again_with_the_same_gradient(
    tiny: Model, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = runner_choice.packed_weights(tiny)
    assert weights is not None
    whole = [PackedRunner(weights, saved_bytes=size)._whole_layers(78) for size in (kept_bytes, 10**9)]
    assert whole[0] < len(weights.layers) <= whole[1]
    monkeypatch.setattr(PackedRunner, "_whole_layers", lambda self, graded: whole[0])
    assert_alike(both(tiny, monkeypatch))


@pytest.mark.parametrize("by", ["kernels", "torch"])
@pytest.mark.parametrize("flags", [{}, {"train_attn": False}])
@pytest.mark.parametrize("last", ["forward", "forward_backward"])
def test_adapters_in_one_pass_have_the_gradient_of_each_alone(
    tiny: Model, by: str, flags: dict[str, bool], last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks and lengths; the last adapter with a gradient or without."""
    weights = runner_choice.packed_weights(tiny)
    assert weights is not None
    if by == "torch":
        monkeypatch.setattr(tiny, "packed", replace(weights, kernels=None))
    elif weights.kernels is None:
        pytest.skip("no kernels on this machine")
    session = Session(tiny)
    ranks = {"a": 3, "b": 3, "c": 3, "d": 2, "e": 2, "f": 2, "g": 2}
    adapters = {
        name: randomise(session.create(name, rank=rank, seed=rank, **flags), seed)
        for seed, (name, rank) in enumerate(ranks.items())
    }
    commands = []
    for seed, name in enumerate(ranks):
        length = 11 if name == "d" else 8
        tokens = [(7 * at + 5 * seed) % 90 for at in range(length + 1)]
        data = [datum(tokens[:-1], target_tokens=tokens[1:], weights=[0.5] * length)]
        op = last if name == "g" else "forward_backward"
        commands.append(pass_frame(op, name, data, "cross_entropy", None))
    together = session.send_all(commands)
    gradients = {name: adapter.gradient_P.clone() for name, adapter in adapters.items()}
    for command, reply, (name, adapter) in zip(commands, together, adapters.items(), strict=True):
        adapter.clear_gradient()
        alone = session.send(command)
        for one, other in zip(read_outputs(reply), read_outputs(alone), strict=True):
            torch.testing.assert_close(one["logprobs"].to_torch(), other["logprobs"].to_torch(), atol=1e-5, rtol=0)
        wanted = adapter.gradient_P
        assert float((gradients[name] - wanted).norm()) <= 1e-4 * float(wanted.norm())
        assert bool(gradients[name].any()) == (name != "g" or last == "forward_backward")
