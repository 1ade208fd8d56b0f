"""Attention of a decode step to the cache, two ways: by the shipped kernels, or by torch.

Axes: B rows, O out, K key heads, G query heads of each, W width of a head, T columns of the cache, N rows times key
heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tinkex.engine.packed import norm_rope_gate
from tinkex.engine.packed.kernels.binding import Attention, Kernels
from tinkex.engine.packed.weights import Weights
from tinkex.engine.sampling.decoder import RowInput
from tinkex.engine.sampling.kv_cache import KVLayer, padding_mask


class Gathered(NamedTuple):
    """What rows found among their own tokens."""

    query_BKGW: Tensor
    """Turned by their positions."""
    out_BKGW: Tensor
    total_BKG: Tensor | None
    """The log of the sum of e to the scores, if it was asked for."""


class Steps(Protocol):
    def begin(self, rows: Sequence[RowInput], width: int) -> None:
        """Before the first layer of a step: where rows stand in a cache that has `width` columns with this one."""

    def attend(self, layer: KVLayer, qkv_BO: Tensor, *, needs_total: bool) -> Gathered:
        """Turn queries and keys, put keys and values into the cache, and look at all that a row has there."""


def steps_for(weights: Weights) -> Steps:
    found = weights.kernels
    if found is None or not found.takes_heads(weights.head_width):
        return TorchSteps(weights)
    return KernelSteps(weights, found)


class TorchSteps:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._shape = (-1, weights.key_heads, weights.heads // weights.key_heads, weights.head_width)

    def begin(self, rows: Sequence[RowInput], width: int) -> None:
        self._angles = self._weights.angles(torch.tensor([row.position for row in rows]))
        mask_BT = padding_mask([row.cached_tokens + 1 for row in rows], width, torch.device("cpu"))
        self._mask_N1T = None
        if mask_BT is not None:
            mask_B1T = torch.zeros(mask_BT.shape).masked_fill_(~mask_BT, -torch.inf)[:, None]
            self._mask_N1T = mask_B1T.repeat_interleave(self._weights.key_heads, 0)

    def attend(self, layer: KVLayer, qkv_BO: Tensor, *, needs_total: bool) -> Gathered:
        weights = self._weights
        norm_rope_gate.rotate(weights, qkv_BO, *self._angles)
        heads, keys = weights.heads, weights.key_heads
        parts_BHW = qkv_BO.view(-1, heads + 2 * keys, weights.head_width)
        q_BHW, k_BKW, v_BKW = torch.split(parts_BHW, [heads, keys, keys], 1)
        k_BKTW, v_BKTW = layer.update(k_BKW[:, :, None], v_BKW[:, :, None])
        q_BKGW = q_BHW.reshape(self._shape)
        q_NGW, k_NTW, v_NTW = (part.flatten(0, 1) for part in (q_BKGW * weights.scale, k_BKTW, v_BKTW))
        k_NWT = k_NTW.transpose(1, 2)
        mask_N1T = self._mask_N1T
        scores_NGT = torch.bmm(q_NGW, k_NWT) if mask_N1T is None else torch.baddbmm(mask_N1T, q_NGW, k_NWT)
        out_BKGW = torch.bmm(torch.softmax(scores_NGT, 2), v_NTW).view(self._shape)
        return Gathered(q_BKGW, out_BKGW, scores_NGT.logsumexp(2).view(self._shape[:3]) if needs_total else None)


class KernelSteps:
    """For heads of a whole number of registers."""

    def __init__(self, weights: Weights, found: Kernels) -> None:
        self._weights, self._kernels = weights, found
        self._shape = (-1, weights.key_heads, weights.heads // weights.key_heads, weights.head_width)

    def begin(self, rows: Sequence[RowInput], width: int) -> None:
        weights, count = self._weights, len(rows)
        self._cos_B1W, self._sin_B1W = weights.angles(torch.tensor([row.position for row in rows]))
        self._held_B = torch.tensor([row.cached_tokens for row in rows])
        self._longest = max(row.cached_tokens for row in rows)
        self._most_BH, self._total_BH = torch.empty(2, count, weights.heads)
        self._job = Attention(
            cosine=self._cos_B1W.data_ptr(),
            sine=self._sin_B1W.data_ptr(),
            held=self._held_B.data_ptr(),
            most=self._most_BH.data_ptr(),
            total=self._total_BH.data_ptr(),
            rows=count,
            heads=weights.heads,
            key_heads=weights.key_heads,
            width=weights.head_width,
            scale=weights.scale,
        )

    def attend(self, layer: KVLayer, qkv_BO: Tensor, *, needs_total: bool) -> Gathered:
        weights, job = self._weights, self._job
        queries = weights.heads * weights.head_width
        out_BO = torch.empty(len(qkv_BO), queries)
        if not layer.is_initialized:
            like_BK1W = qkv_BO.view(len(qkv_BO), -1, 1, weights.head_width)[:, : weights.key_heads]
            layer.lazy_initialization(like_BK1W, like_BK1W)
        # The kernel writes where it is told to; torch would have refused.
        if layer.rows != len(qkv_BO) or self._longest > layer.width:
            raise ValueError(f"{len(qkv_BO)} rows of up to {self._longest} tokens in a cache of {layer.rows}")
        job.column = layer.reserve_columns(1)
        job.qkv, job.gathered = qkv_BO.data_ptr(), out_BO.data_ptr()
        job.keys, job.values, job.columns = layer.keys.data_ptr(), layer.values.data_ptr(), layer.keys.shape[2]
        self._kernels.attend(job)
        if not needs_total:
            return Gathered(out_BO[:, :0], out_BO.view(self._shape), None)
        total_BKG = (self._most_BH + self._total_BH.log()).view(self._shape[:3])
        return Gathered(qkv_BO[:, :queries].reshape(self._shape), out_BO.view(self._shape), total_BKG)
