"""Self-check of the C kernels: runs each of them once on fixed inputs, to compare the results with torch's.

Every operation gets its own input, not the output of the one before: through a whole layer, a softmax of large scores
would turn a difference in the last bit into a large one.

Axes: N tokens, D model width, F width of the MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights, Segment
from tinkex.engine.contract import LoraSpec
from tinkex.engine.packed import norm_rope_gate
from tinkex.engine.packed.kernels.binding import SINGLE_THREAD_UP_TO
from tinkex.engine.packed.lora_train import PackedLora
from tinkex.engine.packed.weights import Group, Weights

SEGMENTS = ((0, 21), (22, 29))
RANKS = (9, 3)
"""Neither rows nor ranks are whole tiles, and row 21 has no adapter."""


@torch.no_grad()
def run_selfcheck(weights: Weights) -> list[Tensor]:
    """Return the results of all operations of a training pass, with the shapes of the model's first layer.

    They are computed by `weights.kernels`, or by torch if that is None.
    """
    layer, width = weights.layers[0], weights.embedding_VD.shape[1]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = SEGMENTS[-1][1] + SINGLE_THREAD_UP_TO // width  # enough for more than one thread
    x_ND, dy_ND, gain_D = random(rows, width), random(rows, width), layer.norm_in_D
    results = [
        norm_rope_gate.rmsnorm(weights, x_ND, gain_D),
        norm_rope_gate.rmsnorm_backward(weights, x_ND, gain_D, dy_ND.clone(), None),
        norm_rope_gate.rmsnorm_backward(weights, x_ND, gain_D, dy_ND.clone(), x_ND),
    ]
    angles = weights.angles(torch.arange(rows))
    for is_back in (False, True):
        results.append(random(rows, layer.qkv.weight_OD.shape[0]))
        norm_rope_gate.apply_rope(weights, results[-1], *angles, is_back=is_back)
    gate_up_NF = random(rows, layer.gate_up.weight_OD.shape[0]) * 4
    results.append(norm_rope_gate.glu(weights, gate_up_NF))
    results.append(norm_rope_gate.glu_backward(weights, gate_up_NF, random(*results[-1].shape)))
    for group in layer.groups:
        adapters = [_random_adapter(group, rank, generator) for rank in RANKS]
        segments = [Segment(adapter, *bounds) for adapter, bounds in zip(adapters, SEGMENTS, strict=True)]
        out, into = group.weight_OD.shape
        lora = PackedLora(segments, rows, rows, kernels=weights.kernels)
        x_ND = random(rows, into)
        results += [lora.forward(group, x_ND), lora.backward(group, x_ND, random(rows, out))]
        gradients = [part.grad for adapter in adapters for pair in adapter.pairs.values() for part in pair]
        results += [gradient for gradient in gradients if gradient is not None]
    return results


def _random_adapter(group: Group, rank: int, generator: torch.Generator) -> LoraWeights:
    pairs = {}
    for site, columns in group.slices.items():
        shapes = (rank, group.weight_OD.shape[1]), (columns.stop - columns.start, rank)
        pairs[site] = torch.randn(shapes[0], generator=generator), torch.randn(shapes[1], generator=generator)
        for part in pairs[site]:
            part.requires_grad_().grad = torch.zeros_like(part)
    return LoraWeights(LoraSpec(rank=rank), pairs)
