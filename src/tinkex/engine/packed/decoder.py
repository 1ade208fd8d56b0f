"""Sampling with a Llama-shaped model: prompts are read packed, rows decode together, a shared prompt is read once.

Decoding is bound by reading the weights, so they are stored a second time in the order that is fastest for a few rows.
Rows that share a prompt attend to its cache in one call, with all their queries, and to their own tokens in another;
both outputs are merged by their log-sum-exp.

Axes: B rows, N tokens of several prompts, T tokens of one, D model width, O out, V vocabulary, H query heads, K key
heads, G query heads of each key head, W width of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import segments_of
from tinkex.engine.packed import head, linear, norm_rope_gate, quantized
from tinkex.engine.packed.decode_attention import decode_attention_for
from tinkex.engine.packed.linear import Linear, PackedLinear
from tinkex.engine.packed.lora_decode import StackedLora
from tinkex.engine.packed.lora_train import PackedLora
from tinkex.engine.packed.runner import PackedRunner
from tinkex.engine.packed.weights import Weights
from tinkex.engine.sampling.decoder import PromptChunk, RowAdapters, RowInput
from tinkex.engine.sampling.kv_cache import KVCache, KVLayer

logger = logging.getLogger("tinkex.engine")

CHECKED_TOKENS = 3
"""Tokens along which decode steps by the kernels are compared with a whole pass by torch."""
TOLERANCE = 1e-3
"""Of the largest hidden state: float32 in another order differs by 1e-6 to 1e-4, a wrong formula by far more."""

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class PackedDecoder:
    """Implements `sampling.decoder.Decoder`."""

    can_share_prefix = True

    def __init__(self, weights: Weights, kind: str = "float32") -> None:
        """`kind`: of the weights that rows decode with, one of `quantized.FORMATS`."""
        self._weights = weights
        self._kind = kind
        self._linears: list[Linear] = []
        """Four of every layer, then the unembedding, which is never quantized. Built when the first step needs them."""
        self._set_up()

    def _set_up(self) -> None:
        weights = self._weights
        kernels = weights.kernels
        self._attention = decode_attention_for(weights)
        sites = [group.slices for layer in weights.layers for group in layer.groups]
        widths = [group.weight_OD.shape[1] for layer in weights.layers for group in layer.groups]
        self._lora = StackedLora(sites, widths, kernels)
        vocabulary, width = weights.head_VD.shape
        self._head_lora = StackedLora([{weights.head_site: slice(0, vocabulary)}], [width], kernels)
        """Separate: the prompts that are read and the rows that decode may have different adapters."""

    # Prompts

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[Tensor]:
        """Fill the caches of prompts, and return the hidden states of their new tokens.

        All new tokens are concatenated [N, D], sorted so that those of one adapter and those of one length are
        neighbours. Everything but attention treats them as one matrix; attention is computed per `PromptBlock`.
        """
        linears: Sequence[Linear | None] = self._decode_linears()  # first: it decides whether the kernels are used
        weights = self._weights
        order = _order(chunks)
        chunks = [chunks[number] for number in order]
        lengths = [len(chunk.tokens) for chunk in chunks]
        segments = segments_of([chunk.weights for chunk in chunks for _ in chunk.tokens])
        lora = PackedLora(segments, sum(lengths), kernels=weights.kernels)
        blocks = _prompt_blocks(chunks)
        positions_N = torch.cat([torch.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks])
        cos_N1W, sin_N1W = weights.angles(positions_N)
        x_ND = weights.embedded(torch.tensor([token for chunk in chunks for token in chunk.tokens]))
        for number, layer in enumerate(weights.layers):
            is_exact = self._kind == "float32"
            qkv, out, gate_up, down = linears[4 * number : 4 * number + 4] if is_exact else (None,) * 4
            qkv_NO = lora.forward(layer.qkv, norm_rope_gate.rmsnorm(weights, x_ND, layer.norm_in_D), qkv)
            norm_rope_gate.rmsnorm_heads(weights, layer, qkv_NO)
            norm_rope_gate.apply_rope(weights, qkv_NO, cos_N1W, sin_N1W)
            attended_NO = torch.cat([self._attend_prompts(block, number, qkv_NO[block.tokens]) for block in blocks])
            middle_ND = lora.forward(layer.out, attended_NO, out).add_(x_ND)
            normed_ND = norm_rope_gate.rmsnorm(weights, middle_ND, layer.norm_mlp_D)
            inner_NF = norm_rope_gate.glu(weights, lora.forward(layer.gate_up, normed_ND, gate_up))
            x_ND = lora.forward(layer.down, inner_NF, down).add_(middle_ND)
        hidden_ND = norm_rope_gate.rmsnorm(weights, x_ND, weights.norm_D)
        hidden_by_number = dict(zip(order, torch.split(hidden_ND, lengths), strict=True))
        return [hidden_by_number[number] for number in range(len(order))]

    def _attend_prompts(self, block: PromptBlock, number: int, qkv_NO: Tensor) -> Tensor:
        """Append the keys and values of new tokens to their prompts' caches, and attend to those."""
        weights, count = self._weights, len(block.caches)
        heads, keys = weights.heads, weights.key_heads
        qkv_BHTW = qkv_NO.view(count, -1, heads + 2 * keys, weights.head_width).transpose(1, 2)
        q_BHTW, k_BKTW, v_BKTW = torch.split(qkv_BHTW, [heads, keys, keys], 1)
        for index, cache in enumerate(block.caches):
            prompt = slice(index, index + 1)
            cached = _layer(cache, number).update(k_BKTW[prompt], v_BKTW[prompt])
            if not block.is_whole:  # one prompt, whose earlier tokens are in the cache
                k_BKTW, v_BKTW = cached
        k_BHTW, v_BHTW = (part.repeat_interleave(heads // keys, 1) for part in (k_BKTW, v_BKTW))
        out_BHTW, _ = _attend(q_BHTW, k_BHTW, v_BHTW, 0.0, block.is_whole, attn_mask=block.mask_TT, scale=weights.scale)
        attended_NO: Tensor = out_BHTW.transpose(1, 2).reshape(-1, weights.heads * weights.head_width)
        return attended_NO

    # Rows

    def step(self, cache: KVCache, rows: Sequence[RowInput]) -> Tensor:
        return self._step(self._decode_linears(), cache, rows)

    def _step(self, linears: Sequence[Linear], cache: KVCache, rows: Sequence[RowInput]) -> Tensor:
        """Compute one token of every row [B, D]: the layers of `layer.forward`, with packed linears and the cache."""
        weights = self._weights
        self._lora.prepare([row.weights for row in rows])
        self._attention.begin(rows, cache.width + 1)
        prefixes = _shared_prefixes(rows)
        x_BD = weights.embedded(torch.tensor([row.token for row in rows]))
        for number, layer in enumerate(weights.layers):
            qkv_BO = self._linear(linears, 4 * number, norm_rope_gate.rmsnorm(weights, x_BD, layer.norm_in_D))
            norm_rope_gate.rmsnorm_heads(weights, layer, qkv_BO)
            attended_BO = self._attend_rows(cache, number, qkv_BO, prefixes)
            x_BD = self._linear(linears, 4 * number + 1, attended_BO, x_BD)
            normed_BD = norm_rope_gate.rmsnorm(weights, x_BD, layer.norm_mlp_D)
            gate_up_BF = self._linear(linears, 4 * number + 2, normed_BD)
            x_BD = self._linear(linears, 4 * number + 3, norm_rope_gate.glu(weights, gate_up_BF), x_BD)
        return norm_rope_gate.rmsnorm(weights, x_BD, weights.norm_D)

    def logits(self, hidden_ND: Tensor, adapters: RowAdapters) -> Tensor:
        if hidden_ND.shape[0] <= linear.PACKED_UP_TO:
            unembed = self._decode_linears()[-1]
            self._head_lora.prepare(adapters)
            logits_NV = unembed(hidden_ND)
            self._head_lora.apply(0, hidden_ND, logits_NV)
            return logits_NV
        return head.unembed(self._weights, hidden_ND, segments_of(adapters))

    def _linear(
        self, linears: Sequence[Linear], number: int, x_BD: Tensor, residual_BO: Tensor | None = None
    ) -> Tensor:
        """Apply a linear layer and the rows' adapters; in one call where the kernels can."""
        decode_linear, kernel_args = linears[number], self._lora.kernel_args(number)
        if kernel_args is not None and isinstance(decode_linear, PackedLinear):
            return decode_linear(x_BD, residual_BO, kernel_args)
        y_BO = decode_linear(x_BD, residual_BO)
        self._lora.apply(number, x_BD, y_BO)
        return y_BO

    def _attend_rows(
        self, cache: KVCache, number: int, qkv_BO: Tensor, prefixes: Mapping[KVCache, Tensor | slice]
    ) -> Tensor:
        """Attend from every row to its own tokens, and to the prompt that it shares with others.

        A softmax over own tokens and prompt together is a weighted mean of the two softmaxes. The weight of the prompt
        is exp(L_prompt) / (exp(L_own) + exp(L_prompt)) = sigmoid(L_prompt − L_own), with L the log-sum-exp of the
        scores. The rows' queries form one matrix [K, rows·G, W] against the prompt's keys, which are then read once
        for all rows.
        """
        weights = self._weights
        query_BKGW, out_BKGW, own_BKG = self._attention.attend(
            _layer(cache, number), qkv_BO, needs_logsumexp=bool(prefixes)
        )
        for prefix, rows in prefixes.items():
            assert own_BKG is not None
            layer = _layer(prefix, number)
            k_1KTW, v_1KTW = layer.keys[:1, :, layer.start : layer.end], layer.values[:1, :, layer.start : layer.end]
            q_1KNW = query_BKGW[rows].transpose(0, 1).flatten(1, 2)[None]
            prompt_1KNW, prompt_1KN = _attend(q_1KNW, k_1KTW, v_1KTW, 0.0, False, scale=weights.scale)
            shape = (weights.key_heads, -1, query_BKGW.shape[2])
            prompt_BKG = prompt_1KN[0].reshape(shape).transpose(0, 1)
            prompt_BKGW = prompt_1KNW[0].reshape(*shape, weights.head_width).transpose(0, 1)
            share_BKG1 = torch.sigmoid(prompt_BKG - own_BKG[rows])[..., None]
            out_BKGW[rows] = torch.lerp(out_BKGW[rows], prompt_BKGW, share_BKG1)
        return out_BKGW.flatten(1)

    # Both

    def _decode_linears(self) -> list[Linear]:
        """Return the linear layers for decoding; on first use, build them and drop kernels that compute wrong."""
        if not self._linears:
            linears = self._build_linears()
            if self._weights.kernels is not None and self._kind == "float32" and not self._is_right(linears):
                logger.warning("The C kernels give wrong numbers here: sampling goes on without them, more slowly.")
                self._weights = replace(self._weights, kernels=None)
                self._set_up()
                linears = self._build_linears()
            self._linears = linears
        return self._linears

    def _build_linears(self) -> list[Linear]:
        groups = [group for layer in self._weights.layers for group in layer.groups]
        linears = [
            quantized.linear_for(self._kind, group.weight_OD, group.bias_O, self._weights.kernels) for group in groups
        ]
        return [*linears, PackedLinear(self._weights.head_VD, None, self._weights.kernels)]

    def _is_right(self, linears: Sequence[Linear]) -> bool:
        """Whether decode steps give what a whole pass by torch gives: the kernels may have been built elsewhere."""
        tokens_T, cache = torch.arange(CHECKED_TOKENS) * 997 % len(self._weights.head_VD), KVCache()
        rows = [RowInput(token, at, at, None) for at, token in enumerate(tokens_T.tolist())]
        stepped = [self._step(linears, cache, [row]) for row in rows]
        whole_TD = PackedRunner(replace(self._weights, kernels=None)).hidden(tokens_T)
        return float((torch.cat(stepped) - whole_TD).abs().max()) <= TOLERANCE * float(whole_TD.abs().max())


class PromptBlock(NamedTuple):
    """Tokens that share a call of attention: new tokens of one prompt, or several whole prompts of one length."""

    tokens: slice
    caches: list[KVCache]
    mask_TT: Tensor | None
    """None for whole prompts, where the plain causal mask is right."""

    @property
    def is_whole(self) -> bool:
        return self.mask_TT is None


def _order(chunks: Sequence[PromptChunk]) -> list[int]:
    """Return the order in which prompts of one adapter, and within those prompts of one length, are neighbours."""
    ranks = {weights: rank for rank, weights in enumerate(dict.fromkeys(chunk.weights for chunk in chunks))}
    keys = [(ranks[chunk.weights], chunk.start, len(chunk.tokens)) for chunk in chunks]
    return sorted(range(len(chunks)), key=keys.__getitem__)


def _prompt_blocks(chunks: Sequence[PromptChunk]) -> list[PromptBlock]:
    """Group neighbouring whole prompts of one length; every other chunk is a block of its own."""
    blocks: list[PromptBlock] = []
    at = 0
    for chunk in chunks:
        length = len(chunk.tokens)
        last = blocks[-1] if blocks else None
        if (
            last is not None
            and last.is_whole
            and chunk.start == 0
            and last.tokens.stop - last.tokens.start == length * len(last.caches)
        ):
            last.caches.append(chunk.cache)
            blocks[-1] = last._replace(tokens=slice(last.tokens.start, at + length))
        else:
            blocks.append(PromptBlock(slice(at, at + length), [chunk.cache], _causal_mask(chunk.start, length)))
        at += length
    return blocks


def _shared_prefixes(rows: Sequence[RowInput]) -> dict[KVCache, Tensor | slice]:
    """Return the caches of shared prompts, each with the rows that attend to it."""
    numbers_of: dict[KVCache, list[int]] = {}
    for number, row in enumerate(rows):
        if row.prefix is not None:
            numbers_of.setdefault(row.prefix, []).append(number)
    shared: dict[KVCache, Tensor | slice] = {}
    for prefix, numbers in numbers_of.items():
        # A slice where the rows are neighbours: a view is cheaper than an index.
        are_neighbours = numbers == list(range(numbers[0], numbers[-1] + 1))
        shared[prefix] = slice(numbers[0], numbers[-1] + 1) if are_neighbours else torch.tensor(numbers)
    return shared


def _layer(cache: KVCache, number: int) -> KVLayer:
    while len(cache.layers) <= number:
        cache.layers.append(KVLayer())
    layer = cache.layers[number]
    assert isinstance(layer, KVLayer)
    return layer


def _causal_mask(at: int, length: int) -> Tensor | None:
    """Return the mask of `length` new tokens after `at` earlier ones; None where the plain causal mask is right."""
    if at == 0:
        return None
    allowed = torch.ones(length, at + length, dtype=torch.bool).tril_(at)
    return torch.zeros(length, at + length).masked_fill_(~allowed, -torch.inf)
