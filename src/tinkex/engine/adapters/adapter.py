"""What one run trains: low-rank weights, their pending gradient and the optimizer's moments, each in one flat buffer.

Autograd sees A and B of every site as leaves that are views of the weights, with `.grad` set to views of the gradient:
backward passes add in place, and optimizer, snapshot and undo each handle whole buffers.

Axes: P all numbers of the adapter, R rank, D in, O out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights, Segment, Site, chosen
from tinkex.engine.contract import EngineFault, LoraSpec, checked
from tinkex.engine.models.loaded_model import Model
from tinkex.rules import limits


class Adapter:
    """One adapter on a base model. New ones start as the base model: A uniform in ±1/√D from the seed, B zero."""

    def __init__(self, model: Model, spec: LoraSpec) -> None:
        self.model = model
        self.spec = spec
        self.sites = sites_for(model, spec)
        total = sum(spec.rank * (site.d_in + site.d_out) for site in self.sites)
        self.weights_P = torch.zeros(total, device=model.device)
        self.gradient_P = torch.zeros(total, device=model.device)
        self.exp_avg_P = torch.zeros(total, device=model.device)
        self.exp_avg_sq_P = torch.zeros(total, device=model.device)
        self.step = 0
        self.has_gradient = False
        gradients = split(self.gradient_P, self.sites, spec.rank)
        leaves: dict[str, tuple[Tensor, Tensor]] = {}
        for name, pair in split(self.weights_P, self.sites, spec.rank).items():
            leaves[name] = (pair[0].detach().requires_grad_(), pair[1].detach().requires_grad_())
            for leaf, gradient in zip(leaves[name], gradients[name], strict=True):
                leaf.grad = gradient
        self.lora = LoraWeights(spec, leaves)
        self._initialise()

    def segments(self, rows: int) -> list[Segment]:
        """This adapter acts on all rows of a batch."""
        return [Segment(self.lora, 0, rows)]

    def clear_gradient(self) -> None:
        # In place: the leaves' gradients are views of it.
        self.gradient_P.zero_()
        self.has_gradient = False

    def _initialise(self) -> None:
        # On the CPU, whatever the device: the same seed gives the same adapter everywhere.
        generator = torch.Generator().manual_seed(self.spec.seed % 2**64)
        with torch.no_grad():
            for site in self.sites:
                bound = 1 / math.sqrt(site.d_in)
                a_RD = torch.empty(self.spec.rank, site.d_in).uniform_(-bound, bound, generator=generator)
                self.lora.pairs[site.name][0].copy_(a_RD)


def sites_for(model: Model, spec: LoraSpec) -> list[Site]:
    """The layers that such an adapter acts on, in the order of its buffers."""
    sites = chosen(model.sites, spec)
    if not sites:
        raise EngineFault(
            "train_attn, train_mlp and train_unembed leave nothing to train on "
            f"{model.info.name}. Set at least one of them to true."
        )
    checked(limits.check_rank, spec.rank, model.info.name, model.info.hidden_size)
    return sites


def split(flat_P: Tensor, sites: Sequence[Site], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A [R, D] and B [O, R] of every site as views of a flat buffer."""
    pairs, at = {}, 0
    for site in sites:
        middle, end = at + rank * site.d_in, at + rank * (site.d_in + site.d_out)
        pairs[site.name] = (flat_P[at:middle].view(rank, site.d_in), flat_P[middle:end].view(site.d_out, rank))
        at = end
    return pairs
