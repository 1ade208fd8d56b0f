"""One layer of a Llama-shaped model, forward and backward. Only adapters have gradients; the base weights are frozen.

    x ─ rmsnorm ─ qkv ─ rope ─ attention ─ out ─(+x)─ middle ─ rmsnorm ─ gate_up ─ glu ─ down ─(+middle)─ output

Saved for the backward pass: the residual stream before attention (x) and before the MLP (middle), rotated queries and
keys, values, attention's output, gate and up. Norms and gates are computed again: they are cheap, and large to keep.

Axes: N tokens, D model width, O out, F width of the MLP, H heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tinkex.engine.packed import norm_rope_gate
from tinkex.engine.packed.attention import SequenceBlock, attend, attend_backward
from tinkex.engine.packed.lora_train import PackedLora
from tinkex.engine.packed.weights import Layer, Weights


class Pack(NamedTuple):
    """What all layers of a pass share: the adapters, the sequences, and RoPE's angles."""

    lora: PackedLora
    blocks: Sequence[SequenceBlock]
    cos_N1W: Tensor
    sin_N1W: Tensor


class SavedActivations(NamedTuple):
    """What a layer's backward pass needs of its forward pass."""

    x_ND: Tensor
    raw_qk_NO: Tensor | None
    """Queries and keys before their norms, where a model has such norms (Qwen3)."""
    qkv_NO: Tensor
    attended_NO: Tensor
    logsumexps: list[Tensor]
    middle_ND: Tensor
    gate_up_NF: Tensor


def forward(weights: Weights, layer: Layer, pack: Pack, x_ND: Tensor) -> tuple[Tensor, SavedActivations]:
    """Return the layer's output and what its backward pass needs."""
    qkv_NO = pack.lora.forward(layer.qkv, norm_rope_gate.rmsnorm(weights, x_ND, layer.norm_in_D))
    raw_qk_NO = norm_rope_gate.rmsnorm_heads(weights, layer, qkv_NO)
    norm_rope_gate.apply_rope(weights, qkv_NO, pack.cos_N1W, pack.sin_N1W)
    attended_NO, logsumexps = attend(weights, qkv_NO, pack.blocks)
    middle_ND = pack.lora.forward(layer.out, attended_NO).add_(x_ND)
    gate_up_NF = pack.lora.forward(layer.gate_up, norm_rope_gate.rmsnorm(weights, middle_ND, layer.norm_mlp_D))
    out_ND = pack.lora.forward(layer.down, norm_rope_gate.glu(weights, gate_up_NF)).add_(middle_ND)
    return out_ND, SavedActivations(x_ND, raw_qk_NO, qkv_NO, attended_NO, logsumexps, middle_ND, gate_up_NF)


def backward(
    weights: Weights, layer: Layer, pack: Pack, saved: SavedActivations, dy_ND: Tensor, *, needs_dx: bool
) -> Tensor:
    """Add to the adapters' gradients and return the gradient of the layer's input."""
    dmiddle_ND = _mlp_backward(weights, layer, pack, saved, dy_ND)
    dattended_NO = pack.lora.backward(layer.out, saved.attended_NO, dmiddle_ND)
    dqkv_NO = attend_backward(weights, saved.qkv_NO, saved.attended_NO, saved.logsumexps, dattended_NO, pack.blocks)
    norm_rope_gate.apply_rope(weights, dqkv_NO, pack.cos_N1W, pack.sin_N1W, is_back=True)
    if saved.raw_qk_NO is not None:
        norm_rope_gate.rmsnorm_heads_backward(weights, layer, saved.raw_qk_NO, dqkv_NO)
    normed_ND = norm_rope_gate.rmsnorm(weights, saved.x_ND, layer.norm_in_D)
    dnormed_ND = pack.lora.backward(layer.qkv, normed_ND, dqkv_NO, needs_dx=needs_dx)
    if not needs_dx:
        return dnormed_ND
    # The residual stream bypasses the norm: its gradient, dmiddle, is added.
    return norm_rope_gate.rmsnorm_backward(weights, saved.x_ND, layer.norm_in_D, dnormed_ND, dmiddle_ND)


def _mlp_backward(weights: Weights, layer: Layer, pack: Pack, saved: SavedActivations, dy_ND: Tensor) -> Tensor:
    dinner_NF = pack.lora.backward(layer.down, norm_rope_gate.glu(weights, saved.gate_up_NF), dy_ND)
    dgate_up_NF = norm_rope_gate.glu_backward(weights, saved.gate_up_NF, dinner_NF)
    normed_ND = norm_rope_gate.rmsnorm(weights, saved.middle_ND, layer.norm_mlp_D)
    dnormed_ND = pack.lora.backward(layer.gate_up, normed_ND, dgate_up_NF)
    return norm_rope_gate.rmsnorm_backward(weights, saved.middle_ND, layer.norm_mlp_D, dnormed_ND, dy_ND)
