"""AdamW on adapters' flat buffers: decoupled weight decay, bias correction, clipping by the global norm.

The steps of several adapters that wait at the same time, with the same settings, share torch's fused kernel: one pass
over the numbers instead of one for every operation of the formula.

A gradient is finite here: a backward pass that would make it otherwise fails and leaves no trace (see `train`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import checked
from tinkex.rules import limits

SLICE = 2**22
"""Numbers updated at a time, so that the copy of what they were stays small beside the adapter."""

Part = tuple[Adapter, slice, float, Tensor]
"""Some numbers of an adapter, by how much its gradient is scaled, and room for two copies of them."""


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
        given = {name: head[name] for name in limits.ADAMW if head.get(name) is not None}
        checked(limits.check_adamw, given)
        return cls(**{name: float(value) for name, value in given.items()})


def step_all(adapters: Sequence[Adapter], settings: AdamW) -> Iterator[tuple[Adapter, dict[str, float]]]:
    """Apply and clear the gradients of adapters of one device, in as few calls as may be; each is told of when it is
    done. Without a gradient nothing changes, and the metric `no_gradient:max` says so."""
    for together in _handfuls(adapters):
        norms = [norm(adapter.gradient_P) for adapter in together]
        clipped = [min(1.0, settings.grad_clip_norm / one) if settings.grad_clip_norm and one else 1.0 for one in norms]
        squares = [0.0] * len(together)
        # Made first: once the first number has changed, nothing more is asked for.
        longest = min(SLICE, max(len(adapter.weights_P) for adapter in together))
        scratch = [torch.empty(2, longest, device=adapter.weights_P.device) for adapter in together]
        graded = [place for place, adapter in enumerate(together) if adapter.has_gradient]
        for part in _parts(together[0].weights_P) if graded else ():  # one part, where there are several adapters
            moved = _update([(together[at], part, clipped[at], scratch[at]) for at in graded], settings)
            for at, one in zip(graded, moved, strict=True):
                squares[at] += one**2
        for adapter, grad_norm, square in zip(together, norms, squares, strict=True):
            adapter.step += adapter.has_gradient
            metrics = {
                "grad_norm:max": grad_norm,
                "update_norm:max": math.sqrt(square),
                "weight_norm:max": norm(adapter.weights_P),
                "step:max": float(adapter.step),
                "learning_rate:max": settings.learning_rate,
                "no_gradient:max": float(not adapter.has_gradient),
            }
            adapter.clear_gradient()
            yield adapter, metrics


def norm(flat_P: Tensor) -> float:
    """The Euclidean norm; inf or nan if a number is, or if its square is beyond float32."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(flat_P[part])) ** 2 for part in _parts(flat_P)))


def _parts(flat_P: Tensor) -> Iterator[slice]:
    return (slice(at, at + SLICE) for at in range(0, len(flat_P), SLICE))


def _handfuls(adapters: Sequence[Adapter]) -> Iterator[list[Adapter]]:
    """Several small ones, up to a slice's worth; a large one alone."""
    handful: list[Adapter] = []
    for adapter in adapters:
        if handful and sum(len(one.weights_P) for one in (*handful, adapter)) > SLICE:
            yield handful
            handful = []
        handful.append(adapter)
    if handful:
        yield handful


def _update(parts: Sequence[Part], settings: AdamW) -> list[float]:
    """The step itself, by torch's own kernel. Returns the norm of what changed, for each."""
    weights, before, gradients = [], [], []
    for adapter, part, clipped, scratch in parts:
        weights.append(adapter.weights_P[part])
        old, gradient = scratch[:, : len(weights[-1])]
        before.append(old.copy_(weights[-1]))
        gradients.append(torch.mul(adapter.gradient_P[part], clipped, out=gradient))
    adamw(
        weights,
        gradients,
        [adapter.exp_avg_P[part] for adapter, part, _, _ in parts],
        [adapter.exp_avg_sq_P[part] for adapter, part, _, _ in parts],
        [],
        # It adds 1 to what it is given.
        [torch.tensor(float(adapter.step), device=adapter.weights_P.device) for adapter, _, _, _ in parts],
        fused=parts[0][0].weights_P.device.type in ("cpu", "cuda"),
        foreach=False,
        amsgrad=False,
        beta1=settings.beta1,
        beta2=settings.beta2,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=False,
    )
    return [float(torch.linalg.vector_norm(old.sub_(new))) for old, new in zip(before, weights, strict=True)]
