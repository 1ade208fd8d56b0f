"""All that kernels do in a training pass, once and piece by piece, on numbers that are always the same: to be compared.

Each piece gets the same input whoever computed the one before. Through a whole layer the softmax would make noise of a
difference in the last bit where a model's scores are large.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights, Segment
from tinkex.engine.contract import LoraSpec
from tinkex.engine.packed import norm_rope_gate
from tinkex.engine.packed.kernels.binding import ALONE
from tinkex.engine.packed.lora_train import Deltas
from tinkex.engine.packed.weights import Group, Weights

PLACES = ((0, 21), (22, 29))
RANKS = (9, 3)
"""Neither rows nor ranks are whole tiles, and one row has no adapter."""


@torch.no_grad()
def run_selfcheck(weights: Weights) -> list[Tensor]:
    """What comes out of every piece, there and back, with the shapes of the model's first layer."""
    layer, width = weights.layers[0], weights.embedding_VD.shape[1]
    source = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    rows = PLACES[-1][1] + ALONE // width  # enough for more than one thread
    x_ND, dy_ND, gain_D = drawn(rows, width), drawn(rows, width), layer.norm_in_D
    found = [
        norm_rope_gate.norm(weights, x_ND, gain_D),
        norm_rope_gate.norm_backward(weights, x_ND, gain_D, dy_ND.clone(), None),
        norm_rope_gate.norm_backward(weights, x_ND, gain_D, dy_ND.clone(), x_ND),
    ]
    angles = weights.angles(torch.arange(rows))
    for is_back in (False, True):
        found.append(drawn(rows, layer.qkv.weight_OD.shape[0]))
        norm_rope_gate.rotate(weights, found[-1], *angles, is_back=is_back)
    gate_up_NF = drawn(rows, layer.gate_up.weight_OD.shape[0]) * 4
    found.append(norm_rope_gate.activate(weights, gate_up_NF))
    found.append(norm_rope_gate.activate_backward(weights, gate_up_NF, drawn(*found[-1].shape)))
    for group in layer.groups:
        adapters = [_adapter(group, rank, source) for rank in RANKS]
        segments = [Segment(one, *place) for one, place in zip(adapters, PLACES, strict=True)]
        out, into = group.weight_OD.shape
        deltas = Deltas(segments, rows, rows, found=weights.kernels)
        x_ND = drawn(rows, into)
        found += [deltas.forward(group, x_ND), deltas.backward(group, x_ND, drawn(rows, out))]
        gradients = [part.grad for one in adapters for pair in one.pairs.values() for part in pair]
        found += [one for one in gradients if one is not None]
    return found


def _adapter(group: Group, rank: int, source: torch.Generator) -> LoraWeights:
    pairs = {}
    for site, place in group.places.items():
        shapes = (rank, group.weight_OD.shape[1]), (place.stop - place.start, rank)
        pairs[site] = torch.randn(shapes[0], generator=source), torch.randn(shapes[1], generator=source)
        for part in pairs[site]:
            part.requires_grad_().grad = torch.zeros_like(part)
    return LoraWeights(LoraSpec(rank=rank), pairs)
