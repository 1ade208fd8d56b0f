"""All losses. Each is a function of the target log-probabilities of one datum, summed over tokens, never averaged.

Per token: `lp` is the log-probability of the target under the model, `q` the caller's `logprobs`, `A` the caller's
`advantages`, `w` the caller's `weights`, and r = exp(lp − q) the ratio; `sg` stops the gradient. `lp` and all inputs
have the shape of the targets, [T] or [T, K] (`datum_tensors` checks that): T tokens, K targets of one position.

A token whose advantage or weight is 0 has loss 0 whatever its ratio: its log-ratio is replaced by 0, because an
overflowing ratio times 0 is NaN. `where` replaces it before `exp`, so the gradient stays finite too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkex.engine.contract import EngineFault, checked
from tinkex.rules import losses as rules
from tinkex.rules.losses import LossRule

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
Metrics = dict[str, float]
"""Metrics of one datum, named `name:reducer`; `rules.metrics.combine` makes those of a call."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss: how it is computed, and the rule that says which inputs and settings it takes."""

    name: str
    rule: LossRule
    compute: Callable[[Tensor, Inputs, Config], tuple[Tensor, Metrics]]
    skips_unlisted: bool = False
    """Whether an entry that a sparse input does not list is left out of the loss, instead of counting as 0."""
    is_by_token: bool = True
    """Whether a token's part of the loss depends on that token only, so that a long datum may be computed in pieces."""


def cross_entropy(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −w·lp, over positions and, with soft targets, over the targets of a position."""
    w = inputs["weights"]
    return -(w * lp).sum(), {"weight:sum": float(w.double().sum())}


def importance_sampling(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −r·A."""
    advantages = inputs["advantages"]
    log_ratio = _log_ratio(lp, inputs)
    return -(log_ratio.exp() * advantages).sum(), _ratio_metrics(log_ratio, advantages) | _difference_metrics(
        lp, inputs
    )


def ppo(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −min(r·A, clip(r, lo, hi)·A)."""
    return _clipped_loss(_log_ratio(lp, inputs), lp, inputs, config)


def cispo(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −sg(clip(r, lo, hi))·lp·A."""
    advantages = inputs["advantages"]
    log_ratio = _log_ratio(lp, inputs).detach()
    ratio = log_ratio.exp()
    clipped = _clip(ratio, inputs, config)
    metrics = _ratio_metrics(log_ratio, advantages) | _clip_metrics(ratio, clipped, advantages)
    metrics |= _difference_metrics(lp, inputs)
    return -(clipped * lp * advantages).sum(), metrics


def dro(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −(lp·A − ½·β·(lp − q)²)."""
    advantages = inputs["advantages"]
    difference = lp - inputs["logprobs"]
    loss = -(lp * advantages - 0.5 * config["beta"] * difference**2).sum()
    return loss, _ratio_metrics(_log_ratio(lp, inputs), advantages) | _difference_metrics(lp, inputs)


def gspo(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −min(s·A, clip(s, lo, hi)·A); s = exp(m + lp − sg(lp)) with m the mean log-ratio of the masked tokens."""
    advantages = inputs["advantages"]
    constant_lp = lp.detach()
    mask = inputs["sequence_ratio_mask"] != 0
    if not bool(mask.any()):
        if bool((advantages != 0).any()):
            raise EngineFault(rules.EMPTY_MASK)
        mask = torch.ones_like(mask)
    mean = (constant_lp - inputs["logprobs"])[mask].mean()
    # The value of `lp - constant_lp` is 0 and its gradient 1: every token has the ratio of the sequence, and its own
    # gradient. A token without an advantage gets the ratio 1.
    log_ratio = torch.where(advantages != 0, mean + lp - constant_lp, lp - constant_lp)
    return _clipped_loss(log_ratio, lp, inputs, config)


def kl_divergence(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """1-D: Σ w·(exp(q − lp) − (q − lp) − 1). 2-D, with q of the teacher: Σ_t w_t Σ_k exp(q)·(q − lp).

    The 1-D form is the estimator of KL(model ‖ q) at tokens drawn from the model; the 2-D form is KL(q ‖ model) over
    the K listed tokens."""
    w, q = inputs["weights"], inputs["logprobs"]
    difference = torch.where(w != 0, q - lp, 0.0)
    per_token = difference.exp() - difference - 1 if lp.ndim == 1 else q.exp() * difference
    return (w * per_token).sum(), {"weight:sum": float(w.double().sum())}


LOSSES: Mapping[str, Loss] = {
    compute.__name__: Loss(compute.__name__, rules.LOSSES[compute.__name__], compute, **extra)
    for compute, extra in (
        (cross_entropy, {}),
        (importance_sampling, {}),
        (ppo, {}),
        (cispo, {}),
        (dro, {}),
        (gspo, {"is_by_token": False}),
        (kl_divergence, {"skips_unlisted": True}),
    )
}


def find_loss(name: object) -> Loss:
    """Return the loss of that name. Raises EngineFault with the known names if there is none."""
    return LOSSES[checked(rules.check_loss_name, name)]


def read_config(loss: Loss, settings: Mapping[str, object]) -> Config:
    """Return the loss's settings: the defaults, replaced by the caller's."""
    return checked(rules.check_config, loss.name, settings)


def _clipped_loss(log_ratio: Tensor, lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −min(r·A, clip(r, lo, hi)·A), with r = exp(log_ratio)."""
    advantages, ratio = inputs["advantages"], log_ratio.exp()
    clipped = _clip(ratio, inputs, config)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    metrics = _ratio_metrics(log_ratio, advantages) | _clip_metrics(ratio, clipped, advantages)
    return loss, metrics | _difference_metrics(lp, inputs)


def _log_ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    """Return lp − q, and 0 for tokens without an advantage (see the top of the file)."""
    return torch.where(inputs["advantages"] != 0, lp - inputs["logprobs"], 0.0)


def _clip(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Clamp the ratio to the thresholds: per token if the datum has them, else those of `loss_fn_config`."""
    low, high = (
        inputs.get(key, torch.full_like(ratio, config[key])) for key in ("clip_low_threshold", "clip_high_threshold")
    )
    return torch.clamp(ratio, low, high)


def _ratio_metrics(log_ratio: Tensor, advantages: Tensor) -> Metrics:
    """Return metrics over the tokens with an advantage; the caller's logprobs of others, such as a prompt's, are often
    made up."""
    log_ratio = log_ratio.detach()[advantages != 0]
    if not log_ratio.numel():
        log_ratio = torch.zeros(1)
    ratio = log_ratio.exp()
    return {
        "ratio:mean": float(ratio.mean()),
        "ratio:min": float(ratio.min()),
        "ratio:max": float(ratio.max()),
        "sampler_kl:mean": float(-log_ratio.mean()),
    }


def _difference_metrics(lp: Tensor, inputs: Inputs) -> Metrics:
    """Return how far the model is from the sampler that drew the tokens: |lp − q| over the tokens with an advantage.

    Of tokens drawn with the weights that are trained it is what trainer and sampler compute differently; later it grows
    with what the steps since then have changed.
    """
    difference = (lp.detach() - inputs["logprobs"]).abs()[inputs["advantages"] != 0]
    if not difference.numel():
        difference = torch.zeros(1)
    return {
        "sampler_logprob_difference:mean": float(difference.mean()),
        "sampler_logprob_difference:max": float(difference.max()),
    }


def _clip_metrics(ratio: Tensor, clipped: Tensor, advantages: Tensor) -> Metrics:
    is_clipped = (ratio.detach() != clipped.detach())[advantages != 0]
    return {"clipped:mean": float(is_clipped.float().mean()) if is_clipped.numel() else 0.0}
