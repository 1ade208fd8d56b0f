"""Sampling with a Llama-shaped model: prompts are read packed, rows step together, a shared prompt is looked at once.

The weights are laid out a second time, for a handful of rows: reading them is what a step costs. Rows that share a
prompt's keys attend to it in one call, all their queries together, and to their own tokens in another; both are merged
by their log-sums.

Axes: B rows, N tokens of several prompts, T tokens of one, D model width, O out, V vocabulary, H query heads, K key
heads, G query heads of each, W width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.decoder import Acting, Next, Reading, segments_of
from tinkex.engine.kv_cache import RowCache, RowLayer, padding_mask
from tinkex.engine.lora import Segment
from tinkex.engine.packed import gemm
from tinkex.engine.packed import layer as layers
from tinkex.engine.packed.deltas import Deltas
from tinkex.engine.packed.stacks import Stacks
from tinkex.engine.packed.weights import Weights

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class PackedDecoder:
    """Implements `decoder.Decoder`."""

    can_share = True

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._linears: list[gemm.Packed] = []
        """Four of every layer, then the unembedding. Made when the first step needs them."""
        places = [group.places for layer in weights.layers for group in layer.groups]
        widths = [group.weight_OD.shape[1] for layer in weights.layers for group in layer.groups]
        self._stacks = Stacks(places, widths)
        vocabulary, width = weights.head_VD.shape
        self._head = Stacks([{weights.head_site: slice(0, vocabulary)}], [width])
        """Of its own: prompts that are read and rows that step need not have the same adapters."""

    # Prompts

    def read(self, readings: Sequence[Reading]) -> list[Tensor]:
        weights = self._weights
        lengths = [len(reading.tokens) for reading in readings]
        segments, at = [], 0
        for reading, length in zip(readings, lengths, strict=True):
            segments += [Segment(reading.weights, at, at + length)] if reading.weights is not None else []
            at += length
        deltas = Deltas(segments, at)
        positions_N = torch.cat(
            [torch.arange(one.at, one.at + length) for one, length in zip(readings, lengths, strict=True)]
        )
        cos_N1W, sin_N1W = weights.angles(positions_N)
        masks = [_causal(one.at, length) for one, length in zip(readings, lengths, strict=True)]
        x_ND = self._embedded([token for reading in readings for token in reading.tokens])
        for number, layer in enumerate(weights.layers):
            normed_ND, _ = layers.norm(x_ND, layer.norm_in_D, weights.eps)
            qkv_NO = deltas.forward(layer.qkv, normed_ND)
            layers.norm_heads(weights, layer, qkv_NO)
            layers.rotate(weights, qkv_NO, cos_N1W, sin_N1W)
            pieces = []
            for reading, part_TO, mask in zip(readings, torch.split(qkv_NO, lengths), masks, strict=True):
                pieces.append(self._look_back(reading.cache, number, part_TO, mask))
            middle_ND = deltas.forward(layer.out, torch.cat(pieces)).add_(x_ND)
            normed_ND, _ = layers.norm(middle_ND, layer.norm_mlp_D, weights.eps)
            inner_NF = layers.activate(weights, deltas.forward(layer.gate_up, normed_ND))
            x_ND = deltas.forward(layer.down, inner_NF).add_(middle_ND)
        hidden_ND, _ = layers.norm(x_ND, weights.norm_D, weights.eps)
        return list(torch.split(hidden_ND, lengths))

    def _look_back(self, cache: RowCache, number: int, qkv_TO: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of a prompt's new tokens to all of it."""
        weights, (q_THW, k_TKW, v_TKW) = self._weights, self._heads(qkv_TO)
        k_1KTW, v_1KTW = _layer(cache, number).update(k_TKW.transpose(0, 1)[None], v_TKW.transpose(0, 1)[None])
        repeats = weights.heads // weights.key_heads
        k_1HTW, v_1HTW = (part.repeat_interleave(repeats, 1) for part in (k_1KTW, v_1KTW))
        q_1HTW = q_THW.transpose(0, 1)[None]
        out_1HTW, _ = _attend(q_1HTW, k_1HTW, v_1HTW, 0.0, mask is None, attn_mask=mask, scale=weights.scale)
        gathered_TO: Tensor = out_1HTW[0].transpose(0, 1).flatten(1)
        return gathered_TO

    # Rows

    def step(self, cache: RowCache, rows: Sequence[Next]) -> Tensor:
        weights = self._weights
        linears = self._packed()
        self._stacks.arrange([row.weights for row in rows])
        cos_B1W, sin_B1W = weights.angles(torch.tensor([row.position for row in rows]))
        mask_BT = padding_mask([row.held + 1 for row in rows], cache.width + 1, torch.device("cpu"))
        mask = None if mask_BT is None else torch.zeros(mask_BT.shape).masked_fill_(~mask_BT, -torch.inf)[:, None, None]
        shared = _shared(rows)
        x_BD = self._embedded([row.token for row in rows])
        width = (x_BD.shape[1],)
        for number, layer in enumerate(weights.layers):
            normed_BD = torch.rms_norm(x_BD, width, layer.norm_in_D, weights.eps)
            qkv_BO = self._linear(linears, 4 * number, normed_BD)
            layers.norm_heads(weights, layer, qkv_BO)
            layers.rotate(weights, qkv_BO, cos_B1W, sin_B1W)
            gathered_BO = self._gather(cache, number, qkv_BO, mask, shared)
            x_BD = self._linear(linears, 4 * number + 1, gathered_BO).add_(x_BD)
            normed_BD = torch.rms_norm(x_BD, width, layer.norm_mlp_D, weights.eps)
            inner_BF = layers.activate(weights, self._linear(linears, 4 * number + 2, normed_BD))
            x_BD = self._linear(linears, 4 * number + 3, inner_BF).add_(x_BD)
        return torch.rms_norm(x_BD, width, weights.norm_D, weights.eps)

    def logits(self, hidden_ND: Tensor, acting: Acting) -> Tensor:
        if hidden_ND.shape[0] <= gemm.PACKED_UP_TO:
            self._head.arrange(acting)
            logits_NV = self._packed()[-1](hidden_ND)
            self._head.add(0, hidden_ND, logits_NV)
            return logits_NV
        logits_NV = gemm.linear(hidden_ND, self._weights.head_VD)
        for weights, start, stop in segments_of(acting):
            pair = weights.pairs.get(self._weights.head_site)
            if pair is not None:
                low_NR = hidden_ND[start:stop] @ pair[0].t() * weights.spec.scale
                logits_NV[start:stop].addmm_(low_NR, pair[1].t())
        return logits_NV

    def _linear(self, linears: Sequence[gemm.Packed], number: int, x_BD: Tensor) -> Tensor:
        y_BO = linears[number](x_BD)
        self._stacks.add(number, x_BD, y_BO)
        return y_BO

    def _gather(
        self, cache: RowCache, number: int, qkv_BO: Tensor, mask: Tensor | None, shared: Sequence[Shared]
    ) -> Tensor:
        """Attention of every row to its own tokens, and to the prompt that it shares."""
        weights, (q_BHW, k_BKW, v_BKW) = self._weights, self._heads(qkv_BO)
        k_BKTW, v_BKTW = _layer(cache, number).update(k_BKW[:, :, None], v_BKW[:, :, None])
        q_BKGW = q_BHW.view(-1, weights.key_heads, weights.heads // weights.key_heads, weights.head_width)
        if mask is not None:
            mask = mask.expand(-1, -1, q_BKGW.shape[2], -1)
        out_BKGW, total_BKG = _attend(q_BKGW, k_BKTW, v_BKTW, 0.0, False, attn_mask=mask, scale=weights.scale)
        for rows, prefix in shared:
            layer = _layer(prefix, number)
            k_1KTW, v_1KTW = layer.keys[:1, :, layer.start : layer.end], layer.values[:1, :, layer.start : layer.end]
            q_1KNW = q_BKGW[rows].transpose(0, 1).flatten(1, 2)[None]
            more_1KNW, more_1KN = _attend(q_1KNW, k_1KTW, v_1KTW, 0.0, False, scale=weights.scale)
            shape = (weights.key_heads, -1, q_BKGW.shape[2])
            more_BKG = more_1KN[0].reshape(shape).transpose(0, 1)
            more_BKGW = more_1KNW[0].reshape(*shape, weights.head_width).transpose(0, 1)
            # Both were softmaxes of their own: the share of each is that of its sum.
            share_BKG1 = torch.sigmoid(more_BKG - total_BKG[rows])[..., None]
            out_BKGW[rows] = torch.lerp(out_BKGW[rows], more_BKGW, share_BKG1)
        gathered_BO: Tensor = out_BKGW.flatten(1)
        return gathered_BO

    # Both

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        x_ND = self._weights.embedding_VD[torch.tensor(tokens)]
        scale = self._weights.embedding_scale
        return x_ND if scale == 1.0 else x_ND.mul_(scale)

    def _heads(self, qkv_NO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = self._weights
        heads, keys = weights.heads, weights.key_heads
        parts_NHW = qkv_NO.view(-1, heads + 2 * keys, weights.head_width)
        return parts_NHW[:, :heads], parts_NHW[:, heads : heads + keys], parts_NHW[:, heads + keys :]

    def _packed(self) -> list[gemm.Packed]:
        if not self._linears:
            for layer in self._weights.layers:
                self._linears += [gemm.Packed(group.weight_OD, group.bias_O) for group in layer.groups]
            self._linears.append(gemm.Packed(self._weights.head_VD))
        return self._linears


class Shared(NamedTuple):
    """Rows that look at one prompt's cache."""

    rows: Tensor | slice
    prefix: RowCache


def _shared(rows: Sequence[Next]) -> list[Shared]:
    places: dict[int, list[int]] = {}
    caches: dict[int, RowCache] = {}
    for number, row in enumerate(rows):
        if row.prefix is not None:
            places.setdefault(id(row.prefix), []).append(number)
            caches[id(row.prefix)] = row.prefix
    found = []
    for key, numbers in places.items():
        is_run = numbers == list(range(numbers[0], numbers[-1] + 1))
        where = slice(numbers[0], numbers[-1] + 1) if is_run else torch.tensor(numbers)
        found.append(Shared(where, caches[key]))
    return found


def _layer(cache: RowCache, number: int) -> RowLayer:
    while len(cache.layers) <= number:
        cache.layers.append(RowLayer())
    layer = cache.layers[number]
    assert isinstance(layer, RowLayer)
    return layer


def _causal(at: int, length: int) -> Tensor | None:
    """What new tokens may see when others stand before them; None where the plain causal mask will do."""
    if at == 0:
        return None
    allowed = torch.ones(length, at + length, dtype=torch.bool).tril_(at)
    return torch.zeros(length, at + length).masked_fill_(~allowed, -torch.inf)
