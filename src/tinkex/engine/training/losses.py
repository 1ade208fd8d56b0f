"""Every loss, as a function of one datum's target log-probabilities. Sums over tokens, never means.

Per token: `lp` the log-probability of the target under the model, `q` the caller's `logprobs`, `A` its `advantages`,
`w` its `weights`, r = exp(lp − q). Inputs have the shape of the targets, [T] or [T, K] (`batch` has seen to that).

A token whose advantage or weight is 0 has loss 0 whatever its ratio is: its log-ratio is taken as 0, because an
overflowing ratio times 0 would be no number.
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
"""Named `name:reducer` for one datum; `rules.metrics.combine` makes those of a call."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss: how it is computed, and the rule that says what it takes."""

    name: str
    rule: LossRule
    compute: Callable[[Tensor, Inputs, Config], tuple[Tensor, Metrics]]
    skips_unlisted: bool = False
    """Whether an entry that a sparse input does not list has no part in the loss, rather than being 0."""
    is_by_token: bool = True
    """Whether a token's part of it depends on that token alone, so that a long datum may be cut."""


def cross_entropy(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −w·lp, over positions and, with soft targets, over the targets of a position."""
    w = inputs["weights"]
    return -(w * lp).sum(), {"weight:sum": float(w.double().sum())}


def importance_sampling(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −r·A."""
    advantages = inputs["advantages"]
    log_ratio = _log_ratio(lp, inputs)
    return -(log_ratio.exp() * advantages).sum(), _ratio_metrics(log_ratio, advantages)


def ppo(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −min(r·A, clip(r, lo, hi)·A)."""
    advantages = inputs["advantages"]
    log_ratio = _log_ratio(lp, inputs)
    ratio = log_ratio.exp()
    clipped = _clip(ratio, inputs, config)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, _ratio_metrics(log_ratio, advantages) | _clip_metrics(ratio, clipped, advantages)


def cispo(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −sg(clip(r, lo, hi))·lp·A."""
    advantages = inputs["advantages"]
    log_ratio = _log_ratio(lp, inputs).detach()
    ratio = log_ratio.exp()
    clipped = _clip(ratio, inputs, config)
    metrics = _ratio_metrics(log_ratio, advantages) | _clip_metrics(ratio, clipped, advantages)
    return -(clipped * lp * advantages).sum(), metrics


def dro(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −(lp·A − ½·β·(lp − q)²)."""
    advantages = inputs["advantages"]
    difference = lp - inputs["logprobs"]
    loss = -(lp * advantages - 0.5 * config["beta"] * difference**2).sum()
    return loss, _ratio_metrics(_log_ratio(lp, inputs), advantages)


def gspo(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Σ −min(s·A, clip(s, lo, hi)·A); s = exp(m + lp − sg(lp)) with m the mean log-ratio of the masked tokens."""
    advantages = inputs["advantages"]
    fixed = lp.detach()
    mask = inputs["sequence_ratio_mask"] != 0
    if not bool(mask.any()):
        if bool((advantages != 0).any()):
            raise EngineFault(rules.EMPTY_MASK)
        mask = torch.ones_like(mask)
    mean = (fixed - inputs["logprobs"])[mask].mean()
    log_ratio = torch.where(advantages != 0, mean + lp - fixed, lp - fixed)
    ratio = log_ratio.exp()
    clipped = _clip(ratio, inputs, config)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, _ratio_metrics(log_ratio, advantages) | _clip_metrics(ratio, clipped, advantages)


def kl_divergence(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """1-D: Σ w·(exp(q − lp) − (q − lp) − 1). 2-D, q the teacher's: Σ_t w_t Σ_k exp(q)·(q − lp)."""
    w, q = inputs["weights"], inputs["logprobs"]
    difference = torch.where(w != 0, q - lp, 0.0)
    each = difference.exp() - difference - 1 if lp.ndim == 1 else q.exp() * difference
    return (w * each).sum(), {"weight:sum": float(w.double().sum())}


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


def find(name: object) -> Loss:
    """Return the loss of that name."""
    return LOSSES[checked(rules.check_loss_name, name)]


def settings(loss: Loss, given: Mapping[str, object]) -> Config:
    """Return the loss's settings: its defaults and what the caller gave."""
    return checked(rules.check_config, loss.name, given)


def _log_ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    return torch.where(inputs["advantages"] != 0, lp - inputs["logprobs"], 0.0)


def _clip(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = (
        inputs.get(key, torch.full_like(ratio, config[key])) for key in ("clip_low_threshold", "clip_high_threshold")
    )
    return torch.clamp(ratio, low, high)


def _ratio_metrics(log_ratio: Tensor, advantages: Tensor) -> Metrics:
    """Over the tokens that have an advantage; others, such as a prompt's, often have no true log-probability."""
    acting = log_ratio.detach()[advantages != 0]
    if not acting.numel():
        acting = torch.zeros(1)
    ratio = acting.exp()
    return {
        "ratio:mean": float(ratio.mean()),
        "ratio:min": float(ratio.min()),
        "ratio:max": float(ratio.max()),
        "sampler_kl:mean": float(-acting.mean()),
    }


def _clip_metrics(ratio: Tensor, clipped: Tensor, advantages: Tensor) -> Metrics:
    acting = advantages != 0
    touched = (ratio.detach() != clipped.detach())[acting]
    return {"clipped:mean": float(touched.float().mean()) if touched.numel() else 0.0}
