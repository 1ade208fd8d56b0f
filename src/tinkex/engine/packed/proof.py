"""A layer forward and backward with adapters, as a sample of all that kernels do in training: to be compared."""

from __future__ import annotations

import torch
from torch import Tensor

from tinkex.engine.base import LoraSpec
from tinkex.engine.lora import LoraWeights, Segment
from tinkex.engine.packed import layer as layers
from tinkex.engine.packed.attention import runs_of
from tinkex.engine.packed.deltas import Deltas
from tinkex.engine.packed.layer import Pack
from tinkex.engine.packed.weights import Weights

LENGTHS = (21, 7)
RANKS = (9, 3)
"""Neither lengths nor ranks are whole tiles."""


@torch.no_grad()
def probe(weights: Weights) -> list[Tensor]:
    """The output of the first layer, d of its input, and the gradients of two random adapters. Always the same ones."""
    layer, count = weights.layers[0], sum(LENGTHS)
    source = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    adapters = []
    for rank in RANKS:
        pairs = {}
        for group in layer.groups:
            for site, place in group.places.items():
                shapes = (rank, group.weight_OD.shape[1]), (place.stop - place.start, rank)
                pairs[site] = drawn(*shapes[0]) * 0.1, drawn(*shapes[1]) * 0.1
                for part in pairs[site]:
                    part.requires_grad_().grad = torch.zeros_like(part)
        adapters.append(LoraWeights(LoraSpec(rank=rank), pairs))
    segments = [Segment(adapters[0], 0, LENGTHS[0]), Segment(adapters[1], LENGTHS[0], count)]
    deltas = Deltas(segments, count, count, found=weights.kernels)
    angles = weights.angles(torch.cat([torch.arange(length) for length in LENGTHS]))
    pack = Pack(deltas, runs_of(LENGTHS), *angles)
    out_ND, kept = layers.forward(weights, layer, pack, drawn(count, weights.embedding_VD.shape[1]))
    dx_ND = layers.backward(weights, layer, pack, kept, drawn(*out_ND.shape), needs_dx=True)
    gradients = [part.grad for one in adapters for pair in one.pairs.values() for part in pair]
    return [out_ND, dx_ND, *(one for one in gradients if one is not None)]
