"""One layer of a Llama-shaped model: forward, and by hand backward. Only adapters have gradients; the base is frozen.

Kept for the backward pass: the residual stream before attention and before the MLP, rotated queries and keys, values,
what attention gathered, gate and up. Norms and activations are computed again: they are cheap, and large to keep.

Axes: N tokens, D model width, O out, F width of the MLP, H heads, W width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinkex.engine.packed.attention import Run, attend, attend_backward
from tinkex.engine.packed.deltas import Deltas
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
    normed_ND, _ = norm(x_ND, layer.norm_in_D, weights.eps)
    qkv_NO = pack.deltas.forward(layer.qkv, normed_ND)
    raw_qk_NO = norm_heads(weights, layer, qkv_NO)
    rotate(weights, qkv_NO, pack.cos_N1W, pack.sin_N1W)
    gathered_NO, totals = attend(weights, qkv_NO, pack.runs)
    middle_ND = pack.deltas.forward(layer.out, gathered_NO).add_(x_ND)
    normed_ND, _ = norm(middle_ND, layer.norm_mlp_D, weights.eps)
    gate_up_NF = pack.deltas.forward(layer.gate_up, normed_ND)
    out_ND = pack.deltas.forward(layer.down, activate(weights, gate_up_NF)).add_(middle_ND)
    return out_ND, Kept(x_ND, raw_qk_NO, qkv_NO, gathered_NO, totals, middle_ND, gate_up_NF)


def backward(weights: Weights, layer: Layer, pack: Pack, kept: Kept, dy_ND: Tensor, *, needs_dx: bool) -> Tensor:
    """d of the layer's input; what adapters get is added to their gradients. `dy_ND` is used up."""
    dmiddle_ND = _mlp_backward(weights, layer, pack, kept, dy_ND)
    dgathered_NO = pack.deltas.backward(layer.out, kept.gathered_NO, dmiddle_ND)
    dqkv_NO = attend_backward(weights, kept.qkv_NO, kept.gathered_NO, kept.totals, dgathered_NO, pack.runs)
    rotate(weights, dqkv_NO, pack.cos_N1W, -pack.sin_N1W)
    if kept.raw_qk_NO is not None:
        _norm_heads_backward(weights, layer, kept.raw_qk_NO, dqkv_NO)
    normed_ND, rstd_N1 = norm(kept.x_ND, layer.norm_in_D, weights.eps)
    dnormed_ND = pack.deltas.backward(layer.qkv, normed_ND, dqkv_NO, needs_dx=needs_dx)
    if not needs_dx:
        return dnormed_ND
    return norm_backward(kept.x_ND, rstd_N1, layer.norm_in_D, dnormed_ND).add_(dmiddle_ND)


def _mlp_backward(weights: Weights, layer: Layer, pack: Pack, kept: Kept, dy_ND: Tensor) -> Tensor:
    gate_NF, up_NF = kept.gate_up_NF.chunk(2, 1)
    active_NF = F.gelu(gate_NF, approximate="tanh") if weights.is_gelu else F.silu(gate_NF)
    dinner_NF = pack.deltas.backward(layer.down, active_NF * up_NF, dy_ND)
    dgate_up_NF = torch.empty_like(kept.gate_up_NF)
    dgate_NF, dup_NF = dgate_up_NF.chunk(2, 1)
    torch.mul(dinner_NF, active_NF, out=dup_NF)
    dinner_NF.mul_(up_NF)
    if weights.is_gelu:
        dgate_NF.copy_(torch.ops.aten.gelu_backward(dinner_NF, gate_NF, approximate="tanh"))
    else:
        dgate_NF.copy_(torch.ops.aten.silu_backward(dinner_NF, gate_NF))
    normed_ND, rstd_N1 = norm(kept.middle_ND, layer.norm_mlp_D, weights.eps)
    dnormed_ND = pack.deltas.backward(layer.gate_up, normed_ND, dgate_up_NF)
    return norm_backward(kept.middle_ND, rstd_N1, layer.norm_mlp_D, dnormed_ND).add_(dy_ND)


def activate(weights: Weights, gate_up_NF: Tensor) -> Tensor:
    gate_NF, up_NF = gate_up_NF.chunk(2, 1)
    active_NF = F.gelu(gate_NF, approximate="tanh") if weights.is_gelu else F.silu(gate_NF)
    return active_NF.mul_(up_NF)


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The root mean square norm over the last axis, and the factor by which it was scaled."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd = torch.addcmul(_number(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * rstd).mul_(weight), rstd


@functools.cache
def _number(value: float) -> Tensor:
    return torch.tensor(value)


def norm_backward(x: Tensor, rstd: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    """dx = r·(w·dy − x·r²·mean(w·dy·x)). `dy` is used up."""
    dy.mul_(weight)
    mean = (dy * x).mean(-1, keepdim=True).mul_(rstd.square())
    return dy.addcmul_(x, mean, value=-1).mul_(rstd)


def rotate(weights: Weights, qkv_NO: Tensor, cos_N1W: Tensor, sin_N1W: Tensor) -> None:
    """Turn queries and keys by their positions, in place. With the negative sine it is its own backward pass."""
    turned = weights.heads + weights.key_heads
    qk_NHW = qkv_NO[:, : turned * weights.head_width].view(-1, turned, weights.head_width)
    one_NHW, other_NHW = qk_NHW.chunk(2, 2)
    before_NHW = one_NHW.clone()
    one_NHW.mul_(cos_N1W).addcmul_(other_NHW, sin_N1W, value=-1)
    other_NHW.mul_(cos_N1W).addcmul_(before_NHW, sin_N1W)


def norm_heads(weights: Weights, layer: Layer, qkv_NO: Tensor) -> Tensor | None:
    """Queries and keys normed head by head, in place, where a model does so; returns them as they were."""
    if layer.q_norm_W is None:
        return None
    qk_NHW, weight_HW = _normed_heads(weights, layer, qkv_NO)
    raw_NO = qk_NHW.flatten(1).clone()
    qk_NHW.copy_(norm(qk_NHW, weight_HW, weights.eps)[0])
    return raw_NO


def _norm_heads_backward(weights: Weights, layer: Layer, raw_qk_NO: Tensor, dqkv_NO: Tensor) -> None:
    dqk_NHW, weight_HW = _normed_heads(weights, layer, dqkv_NO)
    raw_NHW = raw_qk_NO.view(dqk_NHW.shape)
    _, rstd_NH1 = norm(raw_NHW, weight_HW, weights.eps)
    dqk_NHW.copy_(norm_backward(raw_NHW, rstd_NH1, weight_HW, dqk_NHW.clone()))


def _normed_heads(weights: Weights, layer: Layer, qkv_NO: Tensor) -> tuple[Tensor, Tensor]:
    assert layer.q_norm_W is not None and layer.k_norm_W is not None
    heads, keys, width = weights.heads, weights.key_heads, weights.head_width
    qk_NHW = qkv_NO[:, : (heads + keys) * width].view(-1, heads + keys, width)
    weight_HW = torch.cat([layer.q_norm_W.expand(heads, -1), layer.k_norm_W.expand(keys, -1)])
    return qk_NHW, weight_HW
