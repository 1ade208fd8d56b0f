"""Attention over a pack: every sequence attends to itself alone, nothing is padded, nothing is masked by hand.

Sequences of one length that stand side by side share a call. Keys are repeated for the query heads that share them;
what comes back for the repeats is summed.

Axes: N tokens of the pack, B sequences of one length T, H query heads, K key heads, G query heads of each, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.packed.weights import Weights

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Run(NamedTuple):
    """`rows` sequences of `length` tokens each, from token `start` on."""

    start: int
    rows: int
    length: int

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.rows * self.length)


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """Neighbours of one length together."""
    runs: list[Run] = []
    at = 0
    for length in lengths:
        if runs and runs[-1].length == length:
            runs[-1] = runs[-1]._replace(rows=runs[-1].rows + 1)
        else:
            runs.append(Run(at, 1, length))
        at += length
    return runs


def attend(weights: Weights, qkv_NO: Tensor, runs: Sequence[Run]) -> tuple[Tensor, list[Tensor]]:
    """What every token gathers [N, H·W], and what a backward pass needs to know of each run."""
    width = weights.heads * weights.head_width
    pieces, totals = [], []
    for run in runs:
        q_BHTW, k_BHTW, v_BHTW = _heads(weights, qkv_NO[run.tokens], run)
        out_BHTW, total_BHT = _forward(q_BHTW, k_BHTW, v_BHTW, 0.0, True, scale=weights.scale)
        pieces.append(out_BHTW.transpose(1, 2).reshape(-1, width))
        totals.append(total_BHT)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces), totals


def attend_backward(
    weights: Weights, qkv_NO: Tensor, out_ND: Tensor, totals: Sequence[Tensor], dout_ND: Tensor, runs: Sequence[Run]
) -> Tensor:
    """d of queries, keys and values [N, O], from that of what was gathered."""
    dqkv_NO = torch.empty_like(qkv_NO)
    heads, keys, width = weights.heads, weights.key_heads, weights.head_width
    for run, total_BHT in zip(runs, totals, strict=True):
        shape = (run.rows, run.length, heads, width)
        q_BHTW, k_BHTW, v_BHTW = _heads(weights, qkv_NO[run.tokens], run)
        out_BHTW, dout_BHTW = (part[run.tokens].view(shape).transpose(1, 2) for part in (out_ND, dout_ND))
        dq_BHTW, dk_BHTW, dv_BHTW = _backward(
            dout_BHTW, q_BHTW, k_BHTW, v_BHTW, out_BHTW, total_BHT, 0.0, True, scale=weights.scale
        )
        place = dqkv_NO[run.tokens].view(run.rows, run.length, heads + 2 * keys, width)
        place[:, :, :heads] = dq_BHTW.transpose(1, 2)
        for first, d_BHTW in ((heads, dk_BHTW), (heads + keys, dv_BHTW)):
            d_BTKGW = d_BHTW.transpose(1, 2).unflatten(2, (keys, heads // keys))
            torch.sum(d_BTKGW, 3, out=place[:, :, first : first + keys])
    return dqkv_NO


def _heads(weights: Weights, qkv_NO: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    heads, keys = weights.heads, weights.key_heads
    parts = qkv_NO.view(run.rows, run.length, heads + 2 * keys, weights.head_width)
    q_BTHW, k_BTKW, v_BTKW = torch.split(parts, [heads, keys, keys], 2)
    if keys != heads:
        k_BTKW, v_BTKW = (part.repeat_interleave(heads // keys, 2) for part in (k_BTKW, v_BTKW))
    return q_BTHW.transpose(1, 2), k_BTKW.transpose(1, 2), v_BTKW.transpose(1, 2)
