"""What stands between the products of a layer, forward and backward: by the shipped kernels, or by torch.

Axes: N tokens, D model width, O out, F width of the MLP, H heads, W width of a head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from tinkex.engine.packed.kernels.binding import Kernels
from tinkex.engine.packed.weights import Layer, Weights


def norm(weights: Weights, x_ND: Tensor, gain_D: Tensor) -> Tensor:
    """The root mean square norm of every row."""
    if weights.kernels is not None:
        return weights.kernels.norm(x_ND, gain_D, weights.eps)
    return rms(x_ND, gain_D, weights.eps)


def norm_backward(weights: Weights, x_ND: Tensor, gain_D: Tensor, dy_ND: Tensor, onto_ND: Tensor | None) -> Tensor:
    """d of the norm's input, added to `onto_ND`. `dy_ND` is used up."""
    if weights.kernels is not None:
        return weights.kernels.norm_backward(x_ND, gain_D, weights.eps, dy_ND, onto_ND)
    dx_ND = rms_backward(x_ND, gain_D, weights.eps, dy_ND)
    return dx_ND if onto_ND is None else dx_ND.add_(onto_ND)


def rotate(weights: Weights, qkv_NO: Tensor, cos_N1W: Tensor, sin_N1W: Tensor, *, is_back: bool = False) -> None:
    """Turn queries and keys by their positions, in place; back again in the backward pass."""
    turned = weights.heads + weights.key_heads
    if weights.kernels is not None:
        weights.kernels.rotate(qkv_NO, cos_N1W, sin_N1W, turned, weights.head_width, is_back=is_back)
        return
    qk_NHW = qkv_NO[:, : turned * weights.head_width].view(-1, turned, weights.head_width)
    one_NHW, other_NHW = qk_NHW.chunk(2, 2)
    before_NHW = one_NHW.clone()
    sign = -1 if is_back else 1
    one_NHW.mul_(cos_N1W).addcmul_(other_NHW, sin_N1W, value=-sign)
    other_NHW.mul_(cos_N1W).addcmul_(before_NHW, sin_N1W, value=sign)


def activate(weights: Weights, gate_up_NF: Tensor) -> Tensor:
    """act(gate)·up."""
    gates = _gates(weights, gate_up_NF)
    if gates is not None:
        return gates.gate(gate_up_NF)
    gate_NF, up_NF = gate_up_NF.chunk(2, 1)
    return _active(weights, gate_NF).mul_(up_NF)


def activate_backward(weights: Weights, gate_up_NF: Tensor, dinner_NF: Tensor) -> Tensor:
    """d of gate and up. `dinner_NF` is used up."""
    gates = _gates(weights, gate_up_NF)
    if gates is not None:
        return gates.gate_backward(gate_up_NF, dinner_NF)
    gate_NF, up_NF = gate_up_NF.chunk(2, 1)
    dgate_up_NF = torch.empty_like(gate_up_NF)
    dgate_NF, dup_NF = dgate_up_NF.chunk(2, 1)
    torch.mul(dinner_NF, _active(weights, gate_NF), out=dup_NF)
    dinner_NF.mul_(up_NF)
    if weights.is_gelu:
        dgate_NF.copy_(torch.ops.aten.gelu_backward(dinner_NF, gate_NF, approximate="tanh"))
    else:
        dgate_NF.copy_(torch.ops.aten.silu_backward(dinner_NF, gate_NF))
    return dgate_up_NF


def _active(weights: Weights, gate_NF: Tensor) -> Tensor:
    return F.gelu(gate_NF, approximate="tanh") if weights.is_gelu else F.silu(gate_NF)


def _gates(weights: Weights, gate_up_NF: Tensor) -> Kernels | None:
    """The kernels, if they have such gates."""
    found = weights.kernels
    return found if found and not weights.is_gelu and found.takes_gates(gate_up_NF.shape[1] // 2) else None


# Norms by torch


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The root mean square norm over the last axis."""
    return (x * _factor(x, eps)).mul_(gain)


def _factor(x: Tensor, eps: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_number(eps), length, length, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _number(value: float) -> Tensor:
    return torch.tensor(value)


def rms_backward(x: Tensor, gain: Tensor, eps: float, dy: Tensor) -> Tensor:
    """dx = r·(w·dy − x·r²·mean(w·dy·x)). `dy` is used up."""
    rstd = _factor(x, eps)
    dy.mul_(gain)
    mean = (dy * x).mean(-1, keepdim=True).mul_(rstd.square())
    return dy.addcmul_(x, mean, value=-1).mul_(rstd)


def norm_heads(weights: Weights, layer: Layer, qkv_NO: Tensor) -> Tensor | None:
    """Queries and keys normed head by head, in place, where a model does so; returns them as they were."""
    if layer.q_norm_W is None:
        return None
    qk_NHW, gain_HW = _normed_heads(weights, layer, qkv_NO)
    raw_NO = qk_NHW.flatten(1).clone()
    qk_NHW.copy_(rms(qk_NHW, gain_HW, weights.eps))
    return raw_NO


def norm_heads_backward(weights: Weights, layer: Layer, raw_qk_NO: Tensor, dqkv_NO: Tensor) -> None:
    dqk_NHW, gain_HW = _normed_heads(weights, layer, dqkv_NO)
    dqk_NHW.copy_(rms_backward(raw_qk_NO.view(dqk_NHW.shape), gain_HW, weights.eps, dqk_NHW.clone()))


def _normed_heads(weights: Weights, layer: Layer, qkv_NO: Tensor) -> tuple[Tensor, Tensor]:
    assert layer.q_norm_W is not None and layer.k_norm_W is not None
    heads, keys, width = weights.heads, weights.key_heads, weights.head_width
    qk_NHW = qkv_NO[:, : (heads + keys) * width].view(-1, heads + keys, width)
    gain_HW = torch.cat([layer.q_norm_W.expand(heads, -1), layer.k_norm_W.expand(keys, -1)])
    return qk_NHW, gain_HW
