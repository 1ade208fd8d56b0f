"""Runs the rows of a micro-batch that one process of a gang has, through a sharded model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.engine.gang.sharding import ShardedModel
from tinkex.engine.training.general_runner import GeneralRunner
from tinkex.engine.training.runner import Item


class ShardedRunner(GeneralRunner):
    """The general runner, in step with those of the other processes."""

    def __init__(self, base: ShardedModel) -> None:
        super().__init__(base.model)
        self._base = base

    def run_share(self, items: Sequence[Item], phases: Sequence[bool]) -> None:
        """Run this process's items. `phases`: whether each pass of the whole micro-batch needs a gradient."""
        order = {adapter: index for index, adapter in enumerate(dict.fromkeys(item.adapter for item in items))}
        for needs_gradient in phases:
            chosen = [item for item in items if item.needs_gradient is needs_gradient]
            if chosen:
                self.run_items(sorted(chosen, key=lambda item: order[item.adapter]), needs_gradient)
            else:
                self._base.take_part(needs_gradient=needs_gradient)

    def _target_logprobs(self, items: Sequence[Item]) -> list[Tensor]:
        # FSDP hooks the results, and warns that hooks on views get lost: these are a copy of few numbers.
        whole = super()._target_logprobs
        return self._base.run(lambda: [logprobs.clone() for logprobs in whole(items)])

    def _backward(self, logprobs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Go backward whatever failed: the others wait for this process in every layer."""
        if torch.is_grad_enabled():
            filled = [
                torch.zeros_like(lp) if d_lp is None else d_lp for lp, d_lp in zip(logprobs, gradients, strict=True)
            ]
            super()._backward(logprobs, filled)
