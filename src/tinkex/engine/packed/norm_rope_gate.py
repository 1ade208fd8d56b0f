"""Elementwise operations between the matrix products of a layer, forward and backward: RMSNorm, RoPE, gate.

Each function has two ways, the C kernels and torch; `weights.kernels` decides.

Axes: N tokens, D model width, O out (queries, keys and values side by side), F width of the MLP, H heads, W width of a
head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from tinkex.engine.packed.kernels.binding import Kernels
from tinkex.engine.packed.weights import Layer, Weights


def rmsnorm(weights: Weights, x_ND: Tensor, gain_D: Tensor) -> Tensor:
    """Return every row divided by its root mean square, times the gain."""
    if weights.kernels is not None:
        return weights.kernels.rmsnorm(x_ND, gain_D, weights.eps)
    return torch_rmsnorm(x_ND, gain_D, weights.eps)


def rmsnorm_backward(
    weights: Weights, x_ND: Tensor, gain_D: Tensor, dy_ND: Tensor, residual_ND: Tensor | None
) -> Tensor:
    """Return the gradient of the norm's input plus `residual_ND`. Overwrites `dy_ND`."""
    if weights.kernels is not None:
        return weights.kernels.rmsnorm_backward(x_ND, gain_D, weights.eps, dy_ND, residual_ND)
    dx_ND = torch_rmsnorm_backward(x_ND, gain_D, weights.eps, dy_ND)
    return dx_ND if residual_ND is None else dx_ND.add_(residual_ND)


def apply_rope(weights: Weights, qkv_NO: Tensor, cos_N1W: Tensor, sin_N1W: Tensor, *, is_back: bool = False) -> None:
    """Rotate queries and keys by their positions, in place. `is_back` rotates the other way: the backward pass."""
    rotated = weights.heads + weights.key_heads
    if weights.kernels is not None:
        weights.kernels.rope(qkv_NO, cos_N1W, sin_N1W, rotated, weights.head_width, is_back=is_back)
        return
    qk_NHW = qkv_NO[:, : rotated * weights.head_width].view(-1, rotated, weights.head_width)
    left_NHW, right_NHW = qk_NHW.chunk(2, 2)
    before_NHW = left_NHW.clone()
    sign = -1 if is_back else 1
    left_NHW.mul_(cos_N1W).addcmul_(right_NHW, sin_N1W, value=-sign)
    right_NHW.mul_(cos_N1W).addcmul_(before_NHW, sin_N1W, value=sign)


def glu(weights: Weights, gate_up_NF: Tensor) -> Tensor:
    """Return act(gate)·up: SwiGLU, or GeGLU where the model's activation is GELU."""
    kernels = _glu_kernels(weights, gate_up_NF)
    if kernels is not None:
        return kernels.swiglu(gate_up_NF)
    gate_NF, up_NF = gate_up_NF.chunk(2, 1)
    return _activation(weights, gate_NF).mul_(up_NF)


def glu_backward(weights: Weights, gate_up_NF: Tensor, dinner_NF: Tensor) -> Tensor:
    """Return the gradients of gate and up, side by side. Overwrites `dinner_NF`."""
    kernels = _glu_kernels(weights, gate_up_NF)
    if kernels is not None:
        return kernels.swiglu_backward(gate_up_NF, dinner_NF)
    gate_NF, up_NF = gate_up_NF.chunk(2, 1)
    dgate_up_NF = torch.empty_like(gate_up_NF)
    dgate_NF, dup_NF = dgate_up_NF.chunk(2, 1)
    torch.mul(dinner_NF, _activation(weights, gate_NF), out=dup_NF)
    dinner_NF.mul_(up_NF)
    if weights.is_gelu:
        dgate_NF.copy_(torch.ops.aten.gelu_backward(dinner_NF, gate_NF, approximate="tanh"))
    else:
        dgate_NF.copy_(torch.ops.aten.silu_backward(dinner_NF, gate_NF))
    return dgate_up_NF


def _activation(weights: Weights, gate_NF: Tensor) -> Tensor:
    return F.gelu(gate_NF, approximate="tanh") if weights.is_gelu else F.silu(gate_NF)


def _glu_kernels(weights: Weights, gate_up_NF: Tensor) -> Kernels | None:
    """Return the kernels if they have this gate: SwiGLU, of a whole number of registers."""
    kernels, width = weights.kernels, gate_up_NF.shape[1] // 2
    return kernels if kernels and not weights.is_gelu and kernels.supports_gate_width(width) else None


# Norms by torch


def torch_rmsnorm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return (x * _rstd(x, eps)).mul_(gain)


def _rstd(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x²) + eps) over the last axis."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_number(eps), length, length, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _number(value: float) -> Tensor:
    return torch.tensor(value)


def torch_rmsnorm_backward(x: Tensor, gain: Tensor, eps: float, dy: Tensor) -> Tensor:
    """Return dx = r·(gain·dy − x·r²·mean(gain·dy·x)) with r = 1 / sqrt(mean(x²) + eps). Overwrites `dy`."""
    rstd = _rstd(x, eps)
    dy.mul_(gain)
    mean = (dy * x).mean(-1, keepdim=True).mul_(rstd.square())
    return dy.addcmul_(x, mean, value=-1).mul_(rstd)


def rmsnorm_heads(weights: Weights, layer: Layer, qkv_NO: Tensor) -> Tensor | None:
    """Norm queries and keys head by head, in place, where a model does so (Qwen3). Returns them as they were before."""
    if layer.q_norm_W is None:
        return None
    qk_NHW, gain_HW = _heads_and_gains(weights, layer, qkv_NO)
    raw_NO = qk_NHW.flatten(1).clone()
    qk_NHW.copy_(torch_rmsnorm(qk_NHW, gain_HW, weights.eps))
    return raw_NO


def rmsnorm_heads_backward(weights: Weights, layer: Layer, raw_qk_NO: Tensor, dqkv_NO: Tensor) -> None:
    """Turn the gradients of normed queries and keys into those of the raw ones, in place."""
    dqk_NHW, gain_HW = _heads_and_gains(weights, layer, dqkv_NO)
    dqk_NHW.copy_(torch_rmsnorm_backward(raw_qk_NO.view(dqk_NHW.shape), gain_HW, weights.eps, dqk_NHW.clone()))


def _heads_and_gains(weights: Weights, layer: Layer, qkv_NO: Tensor) -> tuple[Tensor, Tensor]:
    assert layer.q_norm_W is not None and layer.k_norm_W is not None
    heads, keys, width = weights.heads, weights.key_heads, weights.head_width
    qk_NHW = qkv_NO[:, : (heads + keys) * width].view(-1, heads + keys, width)
    gain_HW = torch.cat([layer.q_norm_W.expand(heads, -1), layer.k_norm_W.expand(keys, -1)])
    return qk_NHW, gain_HW
