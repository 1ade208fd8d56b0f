"""AdamW on the flat buffers of adapters: decoupled weight decay, bias correction, clipping by the global norm.

Steps of several adapters that wait at the same time, with the same settings, share a call of torch's fused kernel: one
pass over the numbers instead of one for every operation of the formula.

Gradients are finite here: a backward pass whose gradient is not finite fails and is undone (`training.micro_batches`).

Axes: P all numbers of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import checked
from tinkex.rules import ranges

SLICE = 2**22
"""Numbers updated at a time, so that the copy of their old values stays small compared with the adapter."""


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
        """Read the settings of an `optim_step` command; a setting that is absent or null has its default."""
        settings = {name: head[name] for name in ranges.ADAMW if head.get(name) is not None}
        checked(ranges.check_adamw, settings)
        return cls(**{name: float(value) for name, value in settings.items()})


def step_adapters(adapters: Sequence[Adapter], settings: AdamW) -> Iterator[tuple[Adapter, dict[str, float]]]:
    """Apply and clear the gradients of adapters on one device, in as few kernel calls as possible.

    Yields each adapter with its metrics when it is done. An adapter without a gradient does not change, and its metric
    `no_gradient:max` is 1.
    """
    for group in _groups_within_slice(adapters):
        yield from _step_group(group, settings)


def norm(flat_P: Tensor) -> float:
    """Return the Euclidean norm; inf or nan if a number is, or if its square is beyond float32."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(flat_P[part])) ** 2 for part in _slices(flat_P)))


def _step_group(group: Sequence[Adapter], settings: AdamW) -> Iterator[tuple[Adapter, dict[str, float]]]:
    """Step one large adapter slice by slice, or several small ones that fit into one slice together."""
    norms = [norm(adapter.gradient_P) for adapter in group]
    limit = settings.grad_clip_norm
    scales = [min(1.0, limit / grad_norm) if limit and grad_norm else 1.0 for grad_norm in norms]
    squared_updates = [0.0] * len(group)
    # All memory is allocated here: running out of it after the first number has changed would leave a half-done step.
    longest = min(SLICE, max(len(adapter.weights_P) for adapter in group))
    scratch = [torch.empty(2, longest, device=adapter.weights_P.device) for adapter in group]
    with_gradient = [index for index, adapter in enumerate(group) if adapter.has_gradient]
    # Several adapters fit into one slice together, so then this loop runs once and the slice covers each of them.
    for part in _slices(group[0].weights_P) if with_gradient else ():
        slices = [AdapterSlice(group[index], part, scales[index], scratch[index]) for index in with_gradient]
        for index, update_norm in zip(with_gradient, _update(slices, settings), strict=True):
            squared_updates[index] += update_norm**2
    for adapter, grad_norm, squared_update in zip(group, norms, squared_updates, strict=True):
        adapter.step += adapter.has_gradient
        metrics = {
            "grad_norm:max": grad_norm,
            "update_norm:max": math.sqrt(squared_update),
            "weight_norm:max": norm(adapter.weights_P),
            "step:max": float(adapter.step),
            "learning_rate:max": settings.learning_rate,
            "no_gradient:max": float(not adapter.has_gradient),
        }
        adapter.clear_gradient()
        yield adapter, metrics


def _slices(flat_P: Tensor) -> Iterator[slice]:
    return (slice(start, start + SLICE) for start in range(0, len(flat_P), SLICE))


def _groups_within_slice(adapters: Sequence[Adapter]) -> Iterator[list[Adapter]]:
    """Group small adapters up to the size of one slice; a larger adapter is a group of its own."""
    group: list[Adapter] = []
    for adapter in adapters:
        if group and sum(len(member.weights_P) for member in (*group, adapter)) > SLICE:
            yield group
            group = []
        group.append(adapter)
    if group:
        yield group


class AdapterSlice(NamedTuple):
    """Some numbers of an adapter, the factor that clips its gradient, and space for two copies of the numbers."""

    adapter: Adapter
    part: slice
    gradient_scale: float
    scratch_2P: Tensor


def _update(slices: Sequence[AdapterSlice], settings: AdamW) -> list[float]:
    """Update the numbers with torch's own kernel. Returns the norm of the change of each slice."""
    weights, before, gradients = [], [], []
    for adapter, part, gradient_scale, scratch_2P in slices:
        weights.append(adapter.weights_P[part])
        old_P, gradient_P = scratch_2P[:, : len(weights[-1])]
        before.append(old_P.copy_(weights[-1]))
        gradients.append(torch.mul(adapter.gradient_P[part], gradient_scale, out=gradient_P))
    # The fused kernel does not count as a change in place, and a gang sends weights that have changed by that count.
    torch.autograd.graph.increment_version(weights)
    adamw(
        weights,
        gradients,
        [adapter.exp_avg_P[part] for adapter, part, _, _ in slices],
        [adapter.exp_avg_sq_P[part] for adapter, part, _, _ in slices],
        [],
        # The kernel adds 1 to the step that it is given.
        [torch.tensor(float(adapter.step), device=adapter.weights_P.device) for adapter, _, _, _ in slices],
        fused=slices[0].adapter.weights_P.device.type in ("cpu", "cuda"),
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
