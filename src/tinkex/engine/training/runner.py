"""What a runner is: it computes the passes of one base model. Two of them, one contract, the same tests.

`packed.runner` is written by hand for Llama-shaped models; `general` goes through transformers' own modules and takes
any causal LM. Which one a model gets is decided when it is loaded, and said.

A micro-batch holds items of any number of adapters. An item that fails has a fault for its outcome and adds nothing;
the others go on.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault
from tinkex.engine.training.datum_tensors import Datum
from tinkex.engine.training.losses import Config, Loss, Metrics


class Outcome(NamedTuple):
    """What a pass says about one datum."""

    logprobs: Tensor
    metrics: Metrics


@dataclass(slots=True, eq=False)
class Item:
    """One datum of a pass, with the adapter and the loss that it belongs to."""

    adapter: Adapter
    datum: Datum
    loss: Loss
    config: Config
    needs_gradient: bool
    outcome: Outcome | EngineFault | None = None

    @property
    def length(self) -> int:
        return len(self.datum.tokens_T)


class Runner(Protocol):
    """Runs micro-batches of one base model."""

    name: str

    def size(self, count: int, longest: int, total: int) -> int:
        """What so many items, the longest of so many tokens and all of so many, count against the budget."""

    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        """One micro-batch: gives every item its outcome, and adds to the gradients of those that need one.

        Yields where others may take a turn. What it raises concerns all of them: memory has run out, for instance.
        """


def weigh(item: Item, logprobs: Tensor) -> Tensor | None:
    """Set an item's outcome by its targets' log-probabilities. Returns the gradient of its loss by them, if needed."""
    leaf = logprobs.detach().requires_grad_(item.needs_gradient)
    try:
        with torch.set_grad_enabled(item.needs_gradient):
            term, metrics = item.loss.compute(leaf, item.datum.inputs, item.config)
        metrics = {"loss:sum": float(term.detach()), **metrics}
        _check_finite(leaf.detach(), metrics)
    except EngineFault as fault:
        item.outcome = EngineFault(f"data[{item.datum.index}]: {fault}", fault.category)
        return None
    item.outcome = Outcome(leaf.detach().cpu(), metrics)
    return slope(term, leaf) if item.needs_gradient else None


def slope(term: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of a loss by the log-probabilities; 0 if it does not depend on them."""
    if not term.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(term, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found


def _check_finite(logprobs: Tensor, metrics: Metrics) -> None:
    if not bool(logprobs.isfinite().all()):
        raise EngineFault(
            "the model's log-probabilities are not finite, so its weights have grown too large. Load an earlier "
            "checkpoint and use a smaller learning rate."
        )
    wrong = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise EngineFault(
            f"{wrong[0]}. Look for logprobs far from the model's own, or very large weights or advantages."
        )
