"""Attention of a pass over packed tokens: every sequence attends to itself, without padding and without a mask.

Neighbouring sequences of one length share a call of torch's flash attention. Where query heads share a key head
(grouped queries), keys and values are repeated for the call, and the gradients of the repeats are summed.

Axes: N tokens of the pack, B sequences of one length T, H query heads, K key heads, G query heads of each key head,
W width of a head, O all of queries, keys and values side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.packed.weights import Weights

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SequenceBlock(NamedTuple):
    """Neighbouring sequences of `length` tokens each, from token `start` of the pack on."""

    start: int
    sequences: int
    length: int

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.sequences * self.length)


def blocks_of(lengths: Iterable[int], start: int = 0) -> list[SequenceBlock]:
    """Group neighbouring sequences of one length, from token `start` of the pack on."""
    blocks: list[SequenceBlock] = []
    for length, group in groupby(lengths):
        blocks.append(SequenceBlock(start, len(list(group)), length))
        start = blocks[-1].tokens.stop
    return blocks


def attend(weights: Weights, qkv_NO: Tensor, blocks: Sequence[SequenceBlock]) -> tuple[Tensor, list[Tensor]]:
    """Return attention's output [N, H·W], and per block the log-sum-exp of the scores, for the backward pass."""
    width = weights.heads * weights.head_width
    outputs, logsumexps = [], []
    for block in blocks:
        q_BHTW, k_BHTW, v_BHTW = _heads(weights, qkv_NO[block.tokens], block)
        out_BHTW, logsumexp_BHT = _forward(q_BHTW, k_BHTW, v_BHTW, 0.0, True, scale=weights.scale)
        outputs.append(out_BHTW.transpose(1, 2).reshape(-1, width))
        logsumexps.append(logsumexp_BHT)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), logsumexps


def attend_backward(
    weights: Weights,
    qkv_NO: Tensor,
    out_ND: Tensor,
    logsumexps: Sequence[Tensor],
    dout_ND: Tensor,
    blocks: Sequence[SequenceBlock],
) -> Tensor:
    """Return the gradients of queries, keys and values [N, O], from that of attention's output."""
    dqkv_NO = torch.empty_like(qkv_NO)
    heads, keys, width = weights.heads, weights.key_heads, weights.head_width
    for block, logsumexp_BHT in zip(blocks, logsumexps, strict=True):
        shape = (block.sequences, block.length, heads, width)
        q_BHTW, k_BHTW, v_BHTW = _heads(weights, qkv_NO[block.tokens], block)
        out_BHTW, dout_BHTW = (part[block.tokens].view(shape).transpose(1, 2) for part in (out_ND, dout_ND))
        dq_BHTW, dk_BHTW, dv_BHTW = _backward(
            dout_BHTW, q_BHTW, k_BHTW, v_BHTW, out_BHTW, logsumexp_BHT, 0.0, True, scale=weights.scale
        )
        dqkv_BTHW = dqkv_NO[block.tokens].view(block.sequences, block.length, heads + 2 * keys, width)
        dqkv_BTHW[:, :, :heads] = dq_BHTW.transpose(1, 2)
        for first, d_BHTW in ((heads, dk_BHTW), (heads + keys, dv_BHTW)):
            d_BTKGW = d_BHTW.transpose(1, 2).unflatten(2, (keys, heads // keys))
            torch.sum(d_BTKGW, 3, out=dqkv_BTHW[:, :, first : first + keys])
    return dqkv_NO


def _heads(weights: Weights, qkv_NO: Tensor, block: SequenceBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [B, H, T, W], keys and values repeated for the query heads that share them."""
    heads, keys = weights.heads, weights.key_heads
    qkv_BTHW = qkv_NO.view(block.sequences, block.length, heads + 2 * keys, weights.head_width)
    q_BTHW, k_BTKW, v_BTKW = torch.split(qkv_BTHW, [heads, keys, keys], 2)
    if keys != heads:
        k_BTKW, v_BTKW = (part.repeat_interleave(heads // keys, 2) for part in (k_BTKW, v_BTKW))
    return q_BTHW.transpose(1, 2), k_BTKW.transpose(1, 2), v_BTKW.transpose(1, 2)
