"""From logits to tokens: penalties, filters and draws, for the rows of a batch at once.

What is drawn depends on a row's own logits, parameters and seed alone, never on the rows beside it. Log-probabilities
are always the model's own: of the unpenalised, unfiltered logits at temperature 1.

Axes: B rows of the batch, N rows of any kind, K ranked tokens, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tinkex.engine.contract import SampleSpec

COLDEST = 1e-6
"""Temperatures below it are 0: float32 has no room between the best token and the others."""
BLOCK = 256
"""Columns that are summed as one when a token is drawn."""
NARROW = (256, 4096)
"""So many of the best tokens are looked at first; a vocabulary is sorted only for rows whose nucleus is larger."""


class Chooser:
    """How one sequence draws its tokens: its parameters, its random numbers, and what penalties need to know."""

    def __init__(self, spec: SampleSpec, index: int, vocab_size: int, device: torch.device) -> None:
        self.spec = spec
        # Text seeds are hashed with SHA-512: the same numbers in every process and on every platform.
        self._random = random.Random(f"{spec.seed}:{index}")
        self.uniform = self._random.random()
        """The number of [0, 1) that the next token is drawn with."""
        self.has_penalties = (
            spec.repetition_penalty != 1.0 or spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0
        )
        self.is_ranked = 0 < spec.top_k < vocab_size or spec.top_p < 1.0
        self.counts_V = torch.zeros(vocab_size if self.has_penalties else 0, device=device)
        self.seen_V = torch.zeros(vocab_size if self.has_penalties else 0, dtype=torch.bool, device=device)
        if self.has_penalties:
            self.seen_V[torch.tensor(spec.prompt, device=device)] = True

    def note(self, token: int) -> None:
        """Remember a token that was drawn, and go on to the next."""
        self.uniform = self._random.random()
        if self.has_penalties:
            self.counts_V[token] += 1
            self.seen_V[token] = True


def choose(logits_BV: Tensor, choosers: Sequence[Chooser]) -> list[int]:
    """One token for every row. The logits must be finite (or -inf); they stay as they are."""
    penalised = [row for row, chooser in enumerate(choosers) if chooser.has_penalties]
    if penalised:
        logits_BV = logits_BV.index_copy(
            0,
            torch.tensor(penalised, device=logits_BV.device),
            penalise(logits_BV[penalised], [choosers[row] for row in penalised]),
        )
    greedy: list[int] = []
    plain: list[int] = []
    filtered: list[int] = []
    for row, chooser in enumerate(choosers):
        (greedy if chooser.spec.temperature < COLDEST else filtered if chooser.is_ranked else plain).append(row)
    tokens = [0] * len(choosers)
    for rows, draw in ((greedy, _greedy), (plain, _plain), (filtered, _filtered)):
        if rows:
            # Most batches are of one kind: those rows need no copy.
            rows_NV = logits_BV if len(rows) == len(choosers) else logits_BV[rows]
            for row, token in zip(rows, draw(rows_NV, [choosers[row] for row in rows]).tolist(), strict=True):
                tokens[row] = token
    return tokens


def penalise(logits_NV: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """Repetition (over prompt and sample; divides or multiplies), then frequency and presence (over the sample)."""
    device = logits_NV.device
    seen_NV = torch.stack([chooser.seen_V for chooser in choosers])
    counts_NV = torch.stack([chooser.counts_V for chooser in choosers])
    repetition_N1 = _column([chooser.spec.repetition_penalty for chooser in choosers], device)
    frequency_N1 = _column([chooser.spec.frequency_penalty for chooser in choosers], device)
    presence_N1 = _column([chooser.spec.presence_penalty for chooser in choosers], device)
    repeated_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    logits_NV = torch.where(seen_NV, repeated_NV, logits_NV)
    return logits_NV - frequency_N1 * counts_NV - presence_N1 * (counts_NV > 0)


def ranked(values_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of every row and their tokens, largest first; of equal ones the lower token first."""
    if count >= values_NV.shape[1]:
        return values_NV.sort(dim=1, descending=True, stable=True)
    top_NK, tokens_NK = values_NV.topk(count, dim=1)
    last_N1 = top_NK[:, -1:]
    tied_N = ((values_NV >= last_N1).sum(1) > count) & (last_N1[:, 0] > -torch.inf)
    if bool(tied_N.any()):
        # Which of the equals at the end came in is up to topk; a stable sort is not.
        sorted_, tokens = values_NV[tied_N].sort(dim=1, descending=True, stable=True)
        top_NK[tied_N], tokens_NK[tied_N] = sorted_[:, :count], tokens[:, :count]
    tokens_NK, by_token_NK = tokens_NK.sort(dim=1)
    top_NK, by_value_NK = top_NK.gather(1, by_token_NK).sort(dim=1, descending=True, stable=True)
    return top_NK, tokens_NK.gather(1, by_value_NK)


def invert(weights_NV: Tensor, uniforms_NK: Tensor) -> Tensor:
    """Columns drawn in proportion to `weights`, one for every uniform number: the inverse of the cumulative sum.

    The block of columns is found first, then the column in it: the sums of a whole vocabulary, one after another, take
    longer than all else that a draw needs.
    """
    size = weights_NV.shape[1]
    if uniforms_NK.shape[1] > 1:  # then a block for every number would be larger than the sums
        sums_NV = weights_NV.cumsum(1, dtype=wide(weights_NV.device))
        aims_NK = _below(uniforms_NK.to(sums_NV.dtype) * sums_NV[:, -1:], sums_NV[:, -1:])
        return torch.searchsorted(sums_NV, aims_NK, right=True).clamp_(max=size - 1)
    rest = -size % BLOCK
    padded_NV = F.pad(weights_NV, (0, rest)) if rest else weights_NV
    weights_NCV = padded_NV.reshape(len(weights_NV), -1, BLOCK)
    sums_NC = weights_NCV.sum(2, dtype=wide(weights_NV.device)).cumsum(1)
    aims_NK = _below(uniforms_NK.to(sums_NC.dtype) * sums_NC[:, -1:], sums_NC[:, -1:])
    block_NK = torch.searchsorted(sums_NC, aims_NK, right=True).clamp_(max=sums_NC.shape[1] - 1)
    before_NK = F.pad(sums_NC, (1, 0)).gather(1, block_NK)
    chosen_NKV = weights_NCV.gather(1, block_NK[..., None].expand(-1, -1, BLOCK))
    within_NKV = chosen_NKV.cumsum(2, dtype=sums_NC.dtype)
    aims_NK1 = _below((aims_NK - before_NK)[..., None], within_NKV[..., -1:])
    column_NK = torch.searchsorted(within_NKV, aims_NK1, right=True)[..., 0]
    return (block_NK * BLOCK + column_NK).clamp_(max=size - 1)


def _below(aims: Tensor, totals: Tensor) -> Tensor:
    """Rounding may carry an aim up to the total, where no column with any weight is left."""
    return torch.minimum(aims, torch.nextafter(totals, torch.zeros_like(totals)))


def wide(device: torch.device) -> torch.dtype:
    """For sums over a vocabulary: float32 would be off by 1e-4 at its far end. Apple's GPUs have nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64


def _greedy(logits_NV: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    return logits_NV.argmax(1)  # the first of equals


def _plain(logits_NV: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    return invert(_tempered(logits_NV, choosers).exp_(), _uniforms(choosers, logits_NV.device))[:, 0]


def _filtered(logits_NV: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """Draw among the top-k, then within them the top-p. Rows whose nucleus is small never sort their vocabulary."""
    size, device = logits_NV.shape[1], logits_NV.device
    scaled_NV = _tempered(logits_NV, choosers)
    limits = [chooser.spec.top_k if 0 < chooser.spec.top_k < size else size for chooser in choosers]
    limit_N1 = torch.tensor(limits, device=device)[:, None]
    top_p_N1 = _column([chooser.spec.top_p for chooser in choosers], device, wide(device))
    uniform_N1 = _uniforms(choosers, device)
    total_N1 = scaled_NV.exp().sum(1, keepdim=True, dtype=wide(device))

    tokens_N = torch.zeros(len(choosers), dtype=torch.long, device=device)
    left_N = torch.arange(len(choosers), device=device)
    for count in (*(count for count in NARROW if count < size), size):
        values_NK, ids_NK = ranked(scaled_NV[left_N], count)
        limit, top_p = limit_N1[left_N], top_p_N1[left_N]
        weights_NK = values_NK.to(wide(device)).exp()
        weights_NK *= torch.arange(count, device=device)[None] < limit
        total = torch.where(limit < size, weights_NK.sum(1, keepdim=True), total_N1[left_N])
        sums_NK = weights_NK.cumsum(1)
        is_enough_N = (sums_NK[:, -1:] / total >= top_p)[:, 0]
        is_known_N = (limit[:, 0] <= count) | ((limit[:, 0] == size) & is_enough_N)
        is_kept_NK = (sums_NK - weights_NK) / total < top_p
        is_kept_NK[:, 0] = True
        column_N = invert(weights_NK * is_kept_NK, uniform_N1[left_N])
        drawn_N = ids_NK.gather(1, column_N)[:, 0]
        tokens_N[left_N[is_known_N]] = drawn_N[is_known_N]
        left_N = left_N[~is_known_N]
        if not left_N.numel():
            break
    return tokens_N


def _tempered(logits_NV: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """Logits over temperature, the best at 0, without those that min_p rules out."""
    device = logits_NV.device
    temperature_N1 = _column([chooser.spec.temperature for chooser in choosers], device)
    # The best is taken off first, or a tiny temperature would overflow.
    scaled_NV = (logits_NV - logits_NV.amax(1, keepdim=True)) / temperature_N1
    if any(chooser.spec.min_p > 0 for chooser in choosers):
        least_N1 = _column([chooser.spec.min_p for chooser in choosers], device).log()
        scaled_NV = scaled_NV.masked_fill(scaled_NV < least_N1.clamp(max=0), -torch.inf)
    return scaled_NV


def _uniforms(choosers: Sequence[Chooser], device: torch.device) -> Tensor:
    return _column([chooser.uniform for chooser in choosers], device, wide(device))


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
