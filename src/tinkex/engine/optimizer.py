"""AdamW on an adapter's flat buffers: decoupled weight decay, bias correction, clipping by the global norm.

A gradient is finite here: a backward pass that would make it otherwise fails and leaves no trace (see `train`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.adapters import Adapter
from tinkex.engine.base import EngineFault

SLICE = 2**22
"""Numbers updated at a time, so that what the formula holds in between stays small beside the adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """The settings of one step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @classmethod
    def read(cls, head: Mapping[str, Any]) -> AdamW:
        """From a command's head; what is absent or null has its default."""
        given = {name: head[name] for name in _RANGES if head.get(name) is not None}
        for name, value in given.items():
            low, high, words = _RANGES[name]
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise EngineFault(f"{name} is {str(value)[:100]}; it must be {words}.")
        return cls(**{name: float(value) for name, value in given.items()})


_LARGE = 1e4
"""Far beyond any use; it keeps one step from driving the weights out of float32, from where no step leads back."""
_BELOW_1 = math.nextafter(1.0, 0.0)
_RANGES: Mapping[str, tuple[float, float, str]] = {
    "learning_rate": (0.0, _LARGE, "a number from 0 to 10,000"),
    "beta1": (0.0, _BELOW_1, "at least 0 and below 1"),
    "beta2": (0.0, _BELOW_1, "at least 0 and below 1"),
    # Many gradients are exactly 0 in the first step (those of A, as B is 0), and 0/0 would spoil the weights.
    "eps": (1e-20, 1.0, "from 1e-20 to 1"),
    "weight_decay": (0.0, _LARGE, "a number from 0 to 10,000"),
    "grad_clip_norm": (0.0, math.inf, "0 (off) or a positive number"),
}


def step(adapter: Adapter, settings: AdamW) -> dict[str, float]:
    """Apply and clear the gradient. Without one, nothing changes, and the metric `no_gradient:max` says so."""
    if settings.learning_rate * settings.weight_decay > 1:
        raise EngineFault(
            f"learning_rate {settings.learning_rate} times weight_decay {settings.weight_decay} is above 1: the step "
            "would turn every weight's sign. Lower one of them."
        )
    grad_norm, updated = norm(adapter.gradient_P), 0.0
    if adapter.has_gradient:
        if 0 < settings.grad_clip_norm < grad_norm:
            adapter.gradient_P.mul_(settings.grad_clip_norm / grad_norm)
        adapter.step += 1
        updated = math.sqrt(math.fsum(_update(adapter, part, settings) ** 2 for part in _parts(adapter.weights_P)))
    metrics = {
        "grad_norm:max": grad_norm,
        "update_norm:max": updated,
        "weight_norm:max": norm(adapter.weights_P),
        "step:max": float(adapter.step),
        "learning_rate:max": settings.learning_rate,
        "no_gradient:max": float(not adapter.has_gradient),
    }
    adapter.clear_gradient()
    return metrics


def norm(flat_P: Tensor) -> float:
    """The Euclidean norm; inf or nan if a number is, or if its square is beyond float32."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(flat_P[part])) ** 2 for part in _parts(flat_P)))


def _parts(flat_P: Tensor) -> Iterator[slice]:
    return (slice(at, at + SLICE) for at in range(0, len(flat_P), SLICE))


def _update(adapter: Adapter, part: slice, settings: AdamW) -> float:
    """One slice's step, in the order of torch.optim.AdamW. Returns the norm of the change."""
    weights, gradient = adapter.weights_P[part], adapter.gradient_P[part]
    exp_avg, exp_avg_sq = adapter.exp_avg_P[part], adapter.exp_avg_sq_P[part]
    before = weights.clone()
    weights.mul_(1 - settings.learning_rate * settings.weight_decay)
    exp_avg.lerp_(gradient, 1 - settings.beta1)
    exp_avg_sq.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
    correction1 = 1 - settings.beta1**adapter.step
    correction2 = 1 - settings.beta2**adapter.step
    denominator = (exp_avg_sq.sqrt() / math.sqrt(correction2)).add_(settings.eps)
    weights.addcdiv_(exp_avg, denominator, value=-settings.learning_rate / correction1)
    return float(torch.linalg.vector_norm(before.sub_(weights)))
