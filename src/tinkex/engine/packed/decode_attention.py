"""Attention of a decode step to the KV cache: by the C kernels, or by torch.

Every row has one new token. Its query and key are rotated by its position, key and value go into the cache, and the
query attends to all tokens that the row has there, which are right-aligned in the cache's columns.

Axes: B rows, O queries, keys and values side by side, H query heads, K key heads, G query heads of each key head, W
width of a head, T columns of the cache, N rows times key heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.packed import norm_rope_gate
from tinkex.engine.packed.kernels.binding import Attention, Kernels
from tinkex.engine.packed.weights import Weights
from tinkex.engine.sampling.decoder import RowInput
from tinkex.engine.sampling.kv_cache import KVLayer, padding_mask


class AttentionOutput(NamedTuple):
    """What the rows of a step get from their own tokens."""

    query_BKGW: Tensor
    """The rotated queries. Empty if no log-sum-exp was asked for: then the caller needs no queries either."""
    out_BKGW: Tensor
    logsumexp_BKG: Tensor | None
    """Of the scores, if it was asked for: with it, this output can be merged with that over other tokens."""


def decode_attention_for(weights: Weights) -> TorchDecodeAttention | KernelDecodeAttention:
    """Return the kernels' way if they support the model's heads, else torch's."""
    kernels = weights.kernels
    if kernels is None or not kernels.supports_head_width(weights.head_width):
        return TorchDecodeAttention(weights)
    return KernelDecodeAttention(weights, kernels)


class TorchDecodeAttention:
    """Attention of decode steps by two batched products and a softmax."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._shape = (-1, weights.key_heads, weights.heads // weights.key_heads, weights.head_width)

    def begin(self, rows: Sequence[RowInput], width: int) -> None:
        """Prepare a step, before its first layer. `width`: columns of the cache with the new one."""
        self._angles = self._weights.angles(torch.tensor([row.position for row in rows]))
        mask_BT = padding_mask([row.cached_tokens + 1 for row in rows], width, torch.device("cpu"))
        self._mask_N1T = None
        if mask_BT is not None:
            mask_B1T = torch.zeros(mask_BT.shape).masked_fill_(~mask_BT, -torch.inf)[:, None]
            self._mask_N1T = mask_B1T.repeat_interleave(self._weights.key_heads, 0)

    def attend(self, layer: KVLayer, qkv_BO: Tensor, *, needs_logsumexp: bool) -> AttentionOutput:
        """Rotate queries and keys in place, append keys and values to the cache, and attend to it."""
        weights = self._weights
        norm_rope_gate.apply_rope(weights, qkv_BO, *self._angles)
        heads, keys = weights.heads, weights.key_heads
        qkv_BHW = qkv_BO.view(-1, heads + 2 * keys, weights.head_width)
        q_BHW, k_BKW, v_BKW = torch.split(qkv_BHW, [heads, keys, keys], 1)
        k_BKTW, v_BKTW = layer.update(k_BKW[:, :, None], v_BKW[:, :, None])
        q_BKGW = q_BHW.reshape(self._shape)
        q_NGW, k_NTW, v_NTW = (part.flatten(0, 1) for part in (q_BKGW * weights.scale, k_BKTW, v_BKTW))
        k_NWT = k_NTW.transpose(1, 2)
        mask_N1T = self._mask_N1T
        scores_NGT = torch.bmm(q_NGW, k_NWT) if mask_N1T is None else torch.baddbmm(mask_N1T, q_NGW, k_NWT)
        out_BKGW = torch.bmm(torch.softmax(scores_NGT, 2), v_NTW).view(self._shape)
        logsumexp_BKG = scores_NGT.logsumexp(2).view(self._shape[:3]) if needs_logsumexp else None
        return AttentionOutput(q_BKGW, out_BKGW, logsumexp_BKG)


class KernelDecodeAttention:
    """The same by the C kernels, for heads of a whole number of registers."""

    def __init__(self, weights: Weights, kernels: Kernels) -> None:
        self._weights, self._kernels = weights, kernels
        self._shape = (-1, weights.key_heads, weights.heads // weights.key_heads, weights.head_width)

    def begin(self, rows: Sequence[RowInput], width: int) -> None:
        weights, count = self._weights, len(rows)
        self._cos_B1W, self._sin_B1W = weights.angles(torch.tensor([row.position for row in rows]))
        self._lengths_B = torch.tensor([row.cached_tokens for row in rows])
        self._longest = max(row.cached_tokens for row in rows)
        self._largest_BH, self._sum_exp_BH = torch.empty(2, count, weights.heads)
        self._call = Attention(
            cosine=self._cos_B1W.data_ptr(),
            sine=self._sin_B1W.data_ptr(),
            lengths=self._lengths_B.data_ptr(),
            largest=self._largest_BH.data_ptr(),
            sum_exp=self._sum_exp_BH.data_ptr(),
            rows=count,
            heads=weights.heads,
            key_heads=weights.key_heads,
            width=weights.head_width,
            scale=weights.scale,
        )

    def attend(self, layer: KVLayer, qkv_BO: Tensor, *, needs_logsumexp: bool) -> AttentionOutput:
        weights, call = self._weights, self._call
        queries = weights.heads * weights.head_width
        out_BO = torch.empty(len(qkv_BO), queries)
        if not layer.is_initialized:
            like_BK1W = qkv_BO.view(len(qkv_BO), -1, 1, weights.head_width)[:, : weights.key_heads]
            layer.lazy_initialization(like_BK1W, like_BK1W)
        # The kernel writes without checking bounds; torch would have raised an error.
        if layer.rows != len(qkv_BO) or self._longest > layer.width:
            raise ValueError(f"{len(qkv_BO)} rows of up to {self._longest} tokens in a cache of {layer.rows}")
        call.column = layer.reserve_columns(1)
        call.qkv, call.out = qkv_BO.data_ptr(), out_BO.data_ptr()
        call.keys, call.values, call.columns = layer.keys.data_ptr(), layer.values.data_ptr(), layer.keys.shape[2]
        self._kernels.attend(call)
        if not needs_logsumexp:
            return AttentionOutput(out_BO[:, :0], out_BO.view(self._shape), None)
        logsumexp_BKG = (self._largest_BH + self._sum_exp_BH.log()).view(self._shape[:3])
        return AttentionOutput(qkv_BO[:, :queries].reshape(self._shape), out_BO.view(self._shape), logsumexp_BKG)
