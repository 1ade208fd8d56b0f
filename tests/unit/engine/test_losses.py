"""Losses by hand-computed numbers, what they refuse, and what they say in metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tinkex.engine.contract import EngineFault
from tinkex.engine.training import losses
from tinkex.rules.metrics import combine


def value(name: str, lp: Tensor, config: dict[str, float] | None = None, **inputs: Any) -> float:
    return float(compute(name, lp, config, **inputs)[0])


def compute(
    name: str, lp: Tensor, config: dict[str, float] | None = None, **inputs: Any
) -> tuple[Tensor, losses.Metrics]:
    loss = losses.find_loss(name)
    given = {key: torch.as_tensor(numbers, dtype=torch.float32) for key, numbers in inputs.items()}
    return loss.compute(lp, given, losses.read_config(loss, config or {}))


LP = torch.log(torch.tensor([0.5, 0.25, 0.1]))
Q = torch.log(torch.tensor([0.25, 0.25, 0.2]))  # ratios 2, 1, 0.5
A = [1.0, -2.0, 3.0]


def test_each_loss_by_hand() -> None:
    assert value("cross_entropy", LP, weights=[1, 0, 2]) == pytest.approx(-(math.log(0.5) + 2 * math.log(0.1)))
    assert value("importance_sampling", LP, logprobs=Q, advantages=A) == pytest.approx(-(2 * 1 + 1 * -2 + 0.5 * 3))
    assert value("ppo", LP, logprobs=Q, advantages=A) == pytest.approx(-(1.2 * 1 + 1 * -2 + 0.5 * 3))
    assert value("cispo", LP, logprobs=Q, advantages=A) == pytest.approx(
        -(1.2 * math.log(0.5) * 1 + 1 * math.log(0.25) * -2 + 0.8 * math.log(0.1) * 3)
    )
    assert value("dro", LP, logprobs=Q, advantages=A) == pytest.approx(
        -(math.log(0.5) - 2 * math.log(0.25) + 3 * math.log(0.1)) + 0.025 * 2 * math.log(2) ** 2
    )
    # The mean log-ratio is (log 2 + 0 − log 2)/3 = 0, so the sequence's ratio is 1.
    assert value("gspo", LP, logprobs=Q, advantages=A, sequence_ratio_mask=[1, 1, 1]) == pytest.approx(-2.0)
    # Over the first token alone it is 2, clipped to 1.2 where that is less.
    assert value("gspo", LP, logprobs=Q, advantages=A, sequence_ratio_mask=[1, 0, 0]) == pytest.approx(
        -(1.2 * 1 + 2 * -2 + 1.2 * 3)
    )
    assert value("kl_divergence", LP, logprobs=Q, weights=[1, 1, 1]) == pytest.approx(
        (0.5 + math.log(2) - 1) + 0 + (2 - math.log(2) - 1)
    )
    lp_TK, q_TK = LP[:2].reshape(1, 2), Q[1:].reshape(1, 2)
    assert value("kl_divergence", lp_TK, logprobs=q_TK, weights=[[1, 1]]) == pytest.approx(
        0.25 * math.log(0.25 / 0.5) + 0.2 * math.log(0.2 / 0.25)
    )


def test_kl_divergence_of_equal_distributions_is_zero_and_never_negative() -> None:
    assert value("kl_divergence", LP, logprobs=LP, weights=[1, 1, 1]) == 0.0
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0))
    lp = torch.full((100,), -2.0)
    for one, other in zip(lp, lp + noise, strict=True):
        assert value("kl_divergence", one[None], logprobs=other[None], weights=[1.0]) >= 0


def test_cispo_and_gspo_have_a_gradient_through_lp_only() -> None:
    lp = LP.clone().requires_grad_()
    compute("cispo", lp, logprobs=Q, advantages=A)[0].backward()
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, -torch.tensor([1.2 * 1, 1 * -2, 0.8 * 3]))
    lp = LP.clone().requires_grad_()
    compute("gspo", lp, logprobs=Q, advantages=A, sequence_ratio_mask=[1, 1, 1])[0].backward()
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, -torch.tensor(A))


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
def test_a_token_without_advantage_has_no_loss_whatever_its_logprob(name: str) -> None:
    # Callers fill a prompt's log-probabilities with anything; exp(1000) · 0 must not be nan.
    lp = LP.clone().requires_grad_()
    mask = {"sequence_ratio_mask": [0, 1, 1]} if name == "gspo" else {}
    loss, metrics = compute(name, lp, None, logprobs=[-1000.0, *Q[1:].tolist()], advantages=[0.0, -2.0, 3.0], **mask)
    loss.backward()
    assert lp.grad is not None and bool(lp.grad.isfinite().all()) and float(lp.grad[0]) == 0.0
    assert all(math.isfinite(number) for number in (float(loss.detach()), *metrics.values()))


def test_a_token_of_weight_zero_has_no_kl_divergence() -> None:
    assert value("kl_divergence", torch.tensor([-500.0, -1.0]), logprobs=[-0.1, -1.0], weights=[0, 1]) == 0.0


def test_gspo_without_a_masked_token_is_rejected_unless_all_advantages_are_zero() -> None:
    with pytest.raises(EngineFault, match="sequence_ratio_mask is 0 everywhere"):
        value("gspo", LP, logprobs=Q, advantages=A, sequence_ratio_mask=[0, 0, 0])
    assert value("gspo", LP, logprobs=Q, advantages=[0, 0, 0], sequence_ratio_mask=[0, 0, 0]) == 0.0


def test_thresholds_per_token_override_the_config() -> None:
    found = value("ppo", LP, {"clip_high_threshold": 1.5}, logprobs=Q, advantages=A, clip_high_threshold=[1.7, 3, 3])
    assert found == pytest.approx(-(1.7 * 1 + 1 * -2 + 0.5 * 3))


def test_metrics_report_ratios_and_clipping() -> None:
    _, metrics = compute("ppo", LP, logprobs=[*Q[:2].tolist(), -50.0], advantages=[1.0, -2.0, 0.0])
    assert metrics == pytest.approx(
        {
            "ratio:mean": 1.5,
            "ratio:min": 1.0,
            "ratio:max": 2.0,
            "sampler_kl:mean": -math.log(2) / 2,
            "clipped:mean": 0.5,
            "sampler_logprob_difference:mean": math.log(2) / 2,
            "sampler_logprob_difference:max": math.log(2),
        }
    )


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_the_difference_to_the_sampler_is_that_of_torch_over_the_trained_tokens(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    lp, q, advantages = (torch.randn(50, generator=generator) for _ in range(3))
    advantages[::3] = 0
    difference = (lp - q).abs()[advantages != 0]
    mask: dict[str, Any] = {"sequence_ratio_mask": torch.ones(50)} if name == "gspo" else {}
    _, metrics = compute(name, lp, logprobs=q, advantages=advantages, **mask)
    assert metrics["sampler_logprob_difference:mean"] == pytest.approx(float(difference.mean()))
    assert metrics["sampler_logprob_difference:max"] == pytest.approx(float(difference.max()))
    _, none = compute(name, lp, logprobs=q, advantages=torch.zeros(50), **mask)
    assert none["sampler_logprob_difference:max"] == 0.0


def test_metrics_of_a_call_are_combined_by_their_reducer() -> None:
    datums = [{"a:sum": 1, "b:mean": 1, "c:min": 1, "d:max": 1}, {"a:sum": 2, "b:mean": 2, "c:min": 2, "d:max": 2}]
    found = combine((metrics, 1) for metrics in datums)
    assert found == {"a:sum": 3, "b:mean": 1.5, "c:min": 1, "d:max": 2}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stable_reinforce", "not public"),
        ("custom", "forward_backward_custom"),
        ("cross_entopy", "Known: cispo, cross_entropy, dro, gspo, importance_sampling, kl_divergence, ppo"),
        (None, "There is no loss"),
    ],
)
def test_a_loss_that_is_not_offered_is_rejected_with_the_reason(name: Any, words: str) -> None:
    with pytest.raises(EngineFault, match=words) as refused:
        losses.find_loss(name)
    assert refused.value.category == "user"
    assert str(name) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("cross_entropy", {"beta": 1}, "cross_entropy has no setting 'beta'.*takes none"),
        ("ppo", {"clip_low": 0.8}, "ppo has no setting 'clip_low'.*clip_low_threshold and clip_high_threshold"),
        ("dro", {"beta": math.nan}, "'beta'.*is 'nan'"),
        ("dro", {"beta": "much"}, "'beta'.*is 'much'"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold 1.5 is above clip_high_threshold 1.2"),
    ],
)
def test_invalid_loss_settings_are_rejected(name: str, config: Any, words: str) -> None:
    with pytest.raises(EngineFault, match=words) as refused:
        losses.read_config(losses.find_loss(name), config)
    assert refused.value.category == "user"
