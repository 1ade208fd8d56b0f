"""One adapter: low-rank weights, their pending gradient and the optimizer's moments, each in one flat buffer.

Autograd sees A and B of every site as leaves that are views of the weights, with `.grad` set to views of the gradient:
backward passes add in place, and the optimizer, snapshots and undo each work on whole buffers.

Axes: P all numbers of the adapter, R rank, D in, O out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights, Site
from tinkex.engine.contract import EngineFault, LoraSpec, checked
from tinkex.engine.models.loaded_model import Model
from tinkex.rules import ranges


class LoraBuffers:
    """The weights of an adapter and their pending gradient: what a pass needs. All zero at first."""

    def __init__(self, model: Model, spec: LoraSpec) -> None:
        self.model = model
        self.spec = spec
        self.sites = sites_for(model, spec)
        total = sum(spec.rank * (site.d_in + site.d_out) for site in self.sites)
        self.weights_P = torch.zeros(total, device=model.device)
        self.gradient_P = torch.zeros(total, device=model.device)
        self.has_gradient = False
        gradients = split_into_pairs(self.gradient_P, self.sites, spec.rank)
        leaves: dict[str, tuple[Tensor, Tensor]] = {}
        for name, pair in split_into_pairs(self.weights_P, self.sites, spec.rank).items():
            leaves[name] = (pair[0].detach().requires_grad_(), pair[1].detach().requires_grad_())
            for leaf, gradient in zip(leaves[name], gradients[name], strict=True):
                leaf.grad = gradient
        self.lora = LoraWeights(spec, leaves)

    def clear_gradient(self) -> None:
        # In place: the leaves' gradients are views of it.
        self.gradient_P.zero_()
        self.has_gradient = False


class Adapter(LoraBuffers):
    """One adapter on a base model. A new one changes nothing: A is uniform in ±1/√D from the seed, B is zero."""

    def __init__(self, model: Model, spec: LoraSpec) -> None:
        super().__init__(model, spec)
        self.exp_avg_P = torch.zeros_like(self.weights_P)
        self.exp_avg_sq_P = torch.zeros_like(self.weights_P)
        self.step = 0
        # Drawn on the CPU for every device, so that the same seed gives the same adapter everywhere.
        generator = torch.Generator().manual_seed(spec.seed % 2**64)
        with torch.no_grad():
            for site in self.sites:
                bound = 1 / math.sqrt(site.d_in)
                a_RD = torch.empty(spec.rank, site.d_in).uniform_(-bound, bound, generator=generator)
                self.lora.pairs[site.name][0].copy_(a_RD)

    @property
    def state(self) -> dict[str, Tensor]:
        """The buffers that a snapshot always has."""
        return {"weights": self.weights_P, "exp_avg": self.exp_avg_P, "exp_avg_sq": self.exp_avg_sq_P}


def sites_for(model: Model, spec: LoraSpec) -> list[Site]:
    """Return the layers that such an adapter trains, in the order of its buffers. Raises if the spec is impossible."""
    sites = [site for site in model.sites if getattr(spec, site.role.value)]
    if not sites:
        raise EngineFault(
            "train_attn, train_mlp and train_unembed leave nothing to train on "
            f"{model.info.name}. Set at least one of them to true."
        )
    checked(ranges.check_rank, spec.rank, model.info.name, model.info.hidden_size)
    return sites


def split_into_pairs(flat_P: Tensor, sites: Sequence[Site], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [R, D] and B [O, R] of every site as views of a flat buffer."""
    pairs, start = {}, 0
    for site in sites:
        middle, end = start + rank * site.d_in, start + rank * (site.d_in + site.d_out)
        pairs[site.name] = (flat_P[start:middle].view(rank, site.d_in), flat_P[middle:end].view(site.d_out, rank))
        start = end
    return pairs
