"""One layer of a Llama-shaped model: forward, and by hand backward. Only adapters have gradients; the base is frozen.

Kept for the backward pass: the residual stream before attention and before the MLP, rotated queries and keys, values,
what attention gathered, gate and up. Norms and activations are computed again: they are cheap, and large to keep.

Axes: N tokens, D model width, O out, F width of the MLP, H heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tinkex.engine.packed import norm_rope_gate
from tinkex.engine.packed.attention import Run, attend, attend_backward
from tinkex.engine.packed.lora_train import Deltas
from tinkex.engine.packed.weights import Layer, Weights


class Pack(NamedTuple):
    """What all layers of a pass share: who acts where, which tokens belong together, and the angles of positions."""

    deltas: Deltas
    runs: Sequence[Run]
    cos_N1W: Tensor
    sin_N1W: Tensor


class Kept(NamedTuple):
    """What a layer leaves for its backward pass."""

    x_ND: Tensor
    raw_qk_NO: Tensor | None
    """Queries and keys before their norms, where a model has such."""
    qkv_NO: Tensor
    gathered_NO: Tensor
    totals: list[Tensor]
    middle_ND: Tensor
    gate_up_NF: Tensor


def forward(weights: Weights, layer: Layer, pack: Pack, x_ND: Tensor) -> tuple[Tensor, Kept]:
    qkv_NO = pack.deltas.forward(layer.qkv, norm_rope_gate.norm(weights, x_ND, layer.norm_in_D))
    raw_qk_NO = norm_rope_gate.norm_heads(weights, layer, qkv_NO)
    norm_rope_gate.rotate(weights, qkv_NO, pack.cos_N1W, pack.sin_N1W)
    gathered_NO, totals = attend(weights, qkv_NO, pack.runs)
    middle_ND = pack.deltas.forward(layer.out, gathered_NO).add_(x_ND)
    gate_up_NF = pack.deltas.forward(layer.gate_up, norm_rope_gate.norm(weights, middle_ND, layer.norm_mlp_D))
    out_ND = pack.deltas.forward(layer.down, norm_rope_gate.activate(weights, gate_up_NF)).add_(middle_ND)
    return out_ND, Kept(x_ND, raw_qk_NO, qkv_NO, gathered_NO, totals, middle_ND, gate_up_NF)


def backward(weights: Weights, layer: Layer, pack: Pack, kept: Kept, dy_ND: Tensor, *, needs_dx: bool) -> Tensor:
    """d of the layer's input; what adapters get is added to their gradients."""
    dmiddle_ND = _mlp_backward(weights, layer, pack, kept, dy_ND)
    dgathered_NO = pack.deltas.backward(layer.out, kept.gathered_NO, dmiddle_ND)
    dqkv_NO = attend_backward(weights, kept.qkv_NO, kept.gathered_NO, kept.totals, dgathered_NO, pack.runs)
    norm_rope_gate.rotate(weights, dqkv_NO, pack.cos_N1W, pack.sin_N1W, is_back=True)
    if kept.raw_qk_NO is not None:
        norm_rope_gate.norm_heads_backward(weights, layer, kept.raw_qk_NO, dqkv_NO)
    normed_ND = norm_rope_gate.norm(weights, kept.x_ND, layer.norm_in_D)
    dnormed_ND = pack.deltas.backward(layer.qkv, normed_ND, dqkv_NO, needs_dx=needs_dx)
    if not needs_dx:
        return dnormed_ND
    return norm_rope_gate.norm_backward(weights, kept.x_ND, layer.norm_in_D, dnormed_ND, dmiddle_ND)


def _mlp_backward(weights: Weights, layer: Layer, pack: Pack, kept: Kept, dy_ND: Tensor) -> Tensor:
    dinner_NF = pack.deltas.backward(layer.down, norm_rope_gate.activate(weights, kept.gate_up_NF), dy_ND)
    dgate_up_NF = norm_rope_gate.activate_backward(weights, kept.gate_up_NF, dinner_NF)
    normed_ND = norm_rope_gate.norm(weights, kept.middle_ND, layer.norm_mlp_D)
    dnormed_ND = pack.deltas.backward(layer.gate_up, normed_ND, dgate_up_NF)
    return norm_rope_gate.norm_backward(weights, kept.middle_ND, layer.norm_mlp_D, dnormed_ND, dy_ND)
