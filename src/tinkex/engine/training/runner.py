"""The contract of a runner, which computes the forward and backward passes of one base model.

Two runners keep it and pass the same tests: `packed.runner.PackedRunner`, written by hand for Llama-shaped models in
float32 on a CPU, and `general_runner.GeneralRunner`, which goes through transformers' own modules and runs any causal
LM. `engine.runner_choice` picks one when the model is loaded, and logs which.

A micro-batch holds items of any number of adapters. An item that fails gets an `EngineFault` and adds
nothing to a gradient; the other items go on.

Axes: T tokens, K targets of one position.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tinkex.engine.adapters.adapter import LoraBuffers
from tinkex.engine.contract import EngineFault
from tinkex.engine.training.losses import Config, Loss, Metrics


@dataclass(slots=True, eq=False, kw_only=True)
class Item:
    """One datum of a pass, with the adapter and the loss that it belongs to, and what the runner computed for it."""

    adapter: LoraBuffers
    loss: Loss
    config: Config
    needs_gradient: bool
    index: int
    """The datum's position in the data of its pass."""
    tokens_T: Tensor
    targets: Tensor
    """[T] or [T, K]."""
    inputs: Mapping[str, Tensor]
    """Those that the loss takes, in float32 and in the shape of the targets."""
    fault: EngineFault | None = None
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the targets, in their shape."""
    metrics: Metrics = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.tokens_T)


class Runner(Protocol):
    """Runs micro-batches of one base model."""

    def cost_tokens(self, count: int, longest: int, total: int) -> int:
        """Return how much of the token budget `count` items use, the longest of `longest` tokens, all of `total`."""

    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        """Run one micro-batch: set the results of every item and add to the gradients of those that need one.

        Yields where sampling may take a turn. An exception concerns the whole micro-batch, such as out of memory.
        """


def compute_loss(item: Item, logprobs: Tensor) -> Tensor | None:
    """Compute an item's loss from its targets' log-probabilities, and set its results.

    Returns the gradient of the loss with respect to the log-probabilities; None if the item needs none or failed.
    """
    leaf = logprobs.detach().requires_grad_(item.needs_gradient)
    try:
        with torch.set_grad_enabled(item.needs_gradient):
            loss, metrics = item.loss.compute(leaf, item.inputs, item.config)
        metrics = {"loss:sum": float(loss.detach()), **metrics}
        _check_finite(leaf.detach(), metrics)
    except EngineFault as fault:
        item.fault = EngineFault(f"data[{item.index}]: {fault}", fault.category)
        return None
    item.logprobs, item.metrics = leaf.detach().cpu(), metrics
    return loss_gradient(loss, leaf) if item.needs_gradient else None


def loss_gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    """Return the gradient of a loss with respect to the log-probabilities; zeros if it does not depend on them."""
    if not loss.requires_grad:
        return torch.zeros_like(logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    return torch.zeros_like(logprobs) if gradient is None else gradient


def _check_finite(logprobs: Tensor, metrics: Metrics) -> None:
    if not bool(logprobs.isfinite().all()):
        raise EngineFault(
            "the model's log-probabilities are not finite, so its weights have grown too large. Load an earlier "
            "checkpoint and use a smaller learning rate."
        )
    not_finite = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if not_finite:
        raise EngineFault(
            f"{not_finite[0]}. Look for logprobs far from the model's own, or very large weights or advantages."
        )
