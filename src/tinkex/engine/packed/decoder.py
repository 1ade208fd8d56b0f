"""Sampling with a Llama-shaped model: prompts are read packed, rows step together, a shared prompt is looked at once.

The weights are laid out a second time, for a handful of rows: reading them is what a step costs. Rows that share a
prompt's keys attend to it in one call, all their queries together, and to their own tokens in another; both are merged
by their log-sums.

Axes: B rows, N tokens of several prompts, T tokens of one, D model width, O out, V vocabulary, H query heads, K key
heads, G query heads of each, W width of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import segments_of
from tinkex.engine.packed import linear, norm_rope_gate, quantized
from tinkex.engine.packed.decode_attention import steps_for
from tinkex.engine.packed.linear import Packed
from tinkex.engine.packed.lora_decode import Stacks
from tinkex.engine.packed.lora_train import Deltas
from tinkex.engine.packed.quantized import Linear
from tinkex.engine.packed.runner import PackedRunner
from tinkex.engine.packed.weights import Weights
from tinkex.engine.sampling.decoder import PromptChunk, RowAdapters, RowInput
from tinkex.engine.sampling.kv_cache import KVCache, KVLayer

logger = logging.getLogger("tinkex.engine")

PROVED = 3
"""Tokens along which kernels are held against a whole pass."""
TOLERANCE = 1e-3
"""Of the largest hidden state: float32 in another order differs by 1e-6 to 1e-4, a wrong formula by far more."""

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class PackedDecoder:
    """Implements `decoder.Decoder`."""

    can_share_prefix = True

    def __init__(self, weights: Weights, kind: str = "float32") -> None:
        """`kind`: of the weights that rows step with, one of `quantized.FORMATS`."""
        self._weights = weights
        self._kind = kind
        self._linears: list[Linear] = []
        """Four of every layer, then the unembedding, which is never rounded. Made when the first step needs them."""
        self._arrange()

    def _arrange(self) -> None:
        weights = self._weights
        found = weights.kernels
        self._steps = steps_for(weights)
        places = [group.places for layer in weights.layers for group in layer.groups]
        widths = [group.weight_OD.shape[1] for layer in weights.layers for group in layer.groups]
        self._stacks = Stacks(places, widths, found)
        vocabulary, width = weights.head_VD.shape
        self._head = Stacks([{weights.head_site: slice(0, vocabulary)}], [width], found)
        """Of its own: prompts that are read and rows that step need not have the same adapters."""

    # Prompts

    def prefill(self, readings: Sequence[PromptChunk]) -> list[Tensor]:
        linears: Sequence[Linear | None] = self._packed()  # first: it decides whether there are kernels
        weights = self._weights
        order = _order(readings)
        readings = [readings[number] for number in order]
        lengths = [len(reading.tokens) for reading in readings]
        segments = segments_of([one.weights for one in readings for _ in one.tokens])
        deltas = Deltas(segments, sum(lengths), found=weights.kernels)
        looks = _looks(readings)
        positions_N = torch.cat([torch.arange(one.start, one.start + len(one.tokens)) for one in readings])
        cos_N1W, sin_N1W = weights.angles(positions_N)
        x_ND = weights.embedded(torch.tensor([token for reading in readings for token in reading.tokens]))
        for number, layer in enumerate(weights.layers):
            is_exact = self._kind == "float32"
            qkv, out, gate_up, down = linears[4 * number : 4 * number + 4] if is_exact else (None,) * 4
            qkv_NO = deltas.forward(layer.qkv, norm_rope_gate.norm(weights, x_ND, layer.norm_in_D), qkv)
            norm_rope_gate.norm_heads(weights, layer, qkv_NO)
            norm_rope_gate.rotate(weights, qkv_NO, cos_N1W, sin_N1W)
            gathered_NO = torch.cat([self._look_back(look, number, qkv_NO[look.tokens]) for look in looks])
            middle_ND = deltas.forward(layer.out, gathered_NO, out).add_(x_ND)
            normed_ND = norm_rope_gate.norm(weights, middle_ND, layer.norm_mlp_D)
            inner_NF = norm_rope_gate.activate(weights, deltas.forward(layer.gate_up, normed_ND, gate_up))
            x_ND = deltas.forward(layer.down, inner_NF, down).add_(middle_ND)
        hidden_ND = norm_rope_gate.norm(weights, x_ND, weights.norm_D)
        found = dict(zip(order, torch.split(hidden_ND, lengths), strict=True))
        return [found[number] for number in range(len(order))]

    def _look_back(self, look: Look, number: int, qkv_NO: Tensor) -> Tensor:
        """Attention of new tokens to their prompt; its keys and values go into its cache."""
        weights, count = self._weights, len(look.caches)
        repeats = weights.heads // weights.key_heads
        q_BHTW, k_BKTW, v_BKTW = (
            part.view(count, -1, part.shape[1], part.shape[2]).transpose(1, 2) for part in self._heads(qkv_NO)
        )
        for place, cache in enumerate(look.caches):
            one = slice(place, place + 1)
            seen = _layer(cache, number).update(k_BKTW[one], v_BKTW[one])
            if not look.is_whole:
                k_BKTW, v_BKTW = seen
        k_BHTW, v_BHTW = (part.repeat_interleave(repeats, 1) for part in (k_BKTW, v_BKTW))
        out_BHTW, _ = _attend(q_BHTW, k_BHTW, v_BHTW, 0.0, look.is_whole, attn_mask=look.mask_TT, scale=weights.scale)
        gathered_NO: Tensor = out_BHTW.transpose(1, 2).reshape(-1, weights.heads * weights.head_width)
        return gathered_NO

    # Rows

    def step(self, cache: KVCache, rows: Sequence[RowInput]) -> Tensor:
        return self._step(self._packed(), cache, rows)

    def _step(self, linears: Sequence[Linear], cache: KVCache, rows: Sequence[RowInput]) -> Tensor:
        weights, steps = self._weights, self._steps
        self._stacks.arrange([row.weights for row in rows])
        steps.begin(rows, cache.width + 1)
        shared = _shared(rows)
        x_BD = weights.embedded(torch.tensor([row.token for row in rows]))
        for number, layer in enumerate(weights.layers):
            qkv_BO = self._linear(linears, 4 * number, norm_rope_gate.norm(weights, x_BD, layer.norm_in_D))
            norm_rope_gate.norm_heads(weights, layer, qkv_BO)
            gathered_BO = self._gather(cache, number, qkv_BO, shared)
            x_BD = self._linear(linears, 4 * number + 1, gathered_BO, x_BD)
            gate_up_BF = self._linear(linears, 4 * number + 2, norm_rope_gate.norm(weights, x_BD, layer.norm_mlp_D))
            x_BD = self._linear(linears, 4 * number + 3, norm_rope_gate.activate(weights, gate_up_BF), x_BD)
        return norm_rope_gate.norm(weights, x_BD, weights.norm_D)

    def logits(self, hidden_ND: Tensor, acting: RowAdapters) -> Tensor:
        if hidden_ND.shape[0] <= linear.PACKED_UP_TO:
            unembed = self._packed()[-1]
            self._head.arrange(acting)
            logits_NV = unembed(hidden_ND)
            self._head.add(0, hidden_ND, logits_NV)
            return logits_NV
        logits_NV = linear.linear(hidden_ND, self._weights.head_VD)
        for weights, start, stop in segments_of(acting):
            pair = weights.pairs.get(self._weights.head_site)
            if pair is not None:
                low_NR = hidden_ND[start:stop] @ pair[0].t() * weights.spec.scale
                logits_NV[start:stop].addmm_(low_NR, pair[1].t())
        return logits_NV

    def _linear(self, linears: Sequence[Linear], number: int, x_BD: Tensor, onto_BO: Tensor | None = None) -> Tensor:
        linear, adapters = linears[number], self._stacks.job(number)
        if adapters is not None and isinstance(linear, Packed):
            return linear(x_BD, onto_BO, adapters)
        y_BO = linear(x_BD, onto_BO)
        self._stacks.add(number, x_BD, y_BO)
        return y_BO

    def _gather(self, cache: KVCache, number: int, qkv_BO: Tensor, shared: Sequence[Shared]) -> Tensor:
        """Attention of every row to its own tokens, and to the prompt that it shares."""
        weights = self._weights
        query_BKGW, out_BKGW, total_BKG = self._steps.attend(_layer(cache, number), qkv_BO, needs_total=bool(shared))
        for rows, prefix in shared:
            assert total_BKG is not None
            layer = _layer(prefix, number)
            k_1KTW, v_1KTW = layer.keys[:1, :, layer.start : layer.end], layer.values[:1, :, layer.start : layer.end]
            q_1KNW = query_BKGW[rows].transpose(0, 1).flatten(1, 2)[None]
            more_1KNW, more_1KN = _attend(q_1KNW, k_1KTW, v_1KTW, 0.0, False, scale=weights.scale)
            apart = (weights.key_heads, -1, query_BKGW.shape[2])
            more_BKG = more_1KN[0].reshape(apart).transpose(0, 1)
            more_BKGW = more_1KNW[0].reshape(*apart, weights.head_width).transpose(0, 1)
            # Both were softmaxes of their own: the share of each is that of its sum.
            share_BKG1 = torch.sigmoid(more_BKG - total_BKG[rows])[..., None]
            out_BKGW[rows] = torch.lerp(out_BKGW[rows], more_BKGW, share_BKG1)
        return out_BKGW.flatten(1)

    # Both

    def _heads(self, qkv_NO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = self._weights
        heads, keys = weights.heads, weights.key_heads
        parts_NHW = qkv_NO.view(-1, heads + 2 * keys, weights.head_width)
        return parts_NHW[:, :heads], parts_NHW[:, heads : heads + keys], parts_NHW[:, heads + keys :]

    def _packed(self) -> list[Linear]:
        if not self._linears:
            linears = self._laid_out()
            if self._weights.kernels is not None and self._kind == "float32" and not self._is_right(linears):
                logger.warning("The shipped kernels give wrong numbers here: sampling goes on without them, slower.")
                self._weights = replace(self._weights, kernels=None)
                self._arrange()
                linears = self._laid_out()
            self._linears = linears
        return self._linears

    def _laid_out(self) -> list[Linear]:
        groups = [group for layer in self._weights.layers for group in layer.groups]
        linears = [
            quantized.linear_for(self._kind, group.weight_OD, group.bias_O, self._weights.kernels) for group in groups
        ]
        return [*linears, Packed(self._weights.head_VD, None, self._weights.kernels)]

    def _is_right(self, linears: Sequence[Linear]) -> bool:
        """Whether steps find what a whole pass finds: the kernels were built elsewhere."""
        tokens_T, cache = torch.arange(PROVED) * 997 % len(self._weights.head_VD), KVCache()
        rows = [RowInput(token, at, at, None) for at, token in enumerate(tokens_T.tolist())]
        found = [self._step(linears, cache, [row]) for row in rows]
        own_TD = PackedRunner(replace(self._weights, kernels=None)).hidden(tokens_T)
        return float((torch.cat(found) - own_TD).abs().max()) <= TOLERANCE * float(own_TD.abs().max())


class Look(NamedTuple):
    """New tokens of a prompt that has others before; or of several whole prompts of one length."""

    tokens: slice
    caches: list[KVCache]
    mask_TT: Tensor | None
    """None if the plain causal mask will do."""

    @property
    def is_whole(self) -> bool:
        return self.mask_TT is None


def _order(readings: Sequence[PromptChunk]) -> list[int]:
    """Prompts of one adapter stand side by side, and those of one length within."""
    adapters = list(dict.fromkeys(id(reading.weights) for reading in readings))
    places = {adapter: place for place, adapter in enumerate(adapters)}
    kinds = [(places[id(one.weights)], one.start, len(one.tokens)) for one in readings]
    return sorted(range(len(readings)), key=kinds.__getitem__)


def _looks(readings: Sequence[PromptChunk]) -> list[Look]:
    found: list[Look] = []
    at = 0
    for reading in readings:
        length = len(reading.tokens)
        last = found[-1] if found else None
        if (
            last is not None
            and last.is_whole
            and reading.start == 0
            and last.tokens.stop - last.tokens.start == length * len(last.caches)
        ):
            last.caches.append(reading.cache)
            found[-1] = last._replace(tokens=slice(last.tokens.start, at + length))
        else:
            found.append(Look(slice(at, at + length), [reading.cache], _causal(reading.start, length)))
        at += length
    return found


class Shared(NamedTuple):
    """Rows that look at one prompt's cache."""

    rows: Tensor | slice
    prefix: KVCache


def _shared(rows: Sequence[RowInput]) -> list[Shared]:
    places: dict[int, list[int]] = {}
    caches: dict[int, KVCache] = {}
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


def _layer(cache: KVCache, number: int) -> KVLayer:
    while len(cache.layers) <= number:
        cache.layers.append(KVLayer())
    layer = cache.layers[number]
    assert isinstance(layer, KVLayer)
    return layer


def _causal(at: int, length: int) -> Tensor | None:
    """What new tokens may see when others stand before them; None where the plain causal mask will do."""
    if at == 0:
        return None
    allowed = torch.ones(length, at + length, dtype=torch.bool).tril_(at)
    return torch.zeros(length, at + length).masked_fill_(~allowed, -torch.inf)
