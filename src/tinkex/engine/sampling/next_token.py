"""Draws the next token of every row of a batch from the logits: penalties, temperature, filters, random numbers.

The token of a row depends only on its own logits, parameters and seed, never on the other rows in the batch. Reported
log-probabilities are not computed here: they are the model's own, without penalties and filters, at temperature 1.

Axes: B rows of the batch, N rows of one kind, K ranked or drawn tokens, C blocks of columns, V vocabulary, 1 a column
of one number per row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tinkex.engine.contract import SampleSpec

COLDEST = 1e-6
"""Lower temperatures count as 0: float32 could not tell the best token from the others."""
BLOCK = 256
"""Columns that are summed together first when a token is drawn."""
TRIED_COUNTS = (256, 4096)
"""Filters rank only so many of the best tokens first. The vocabulary is sorted only for rows whose top-p set is
larger."""


class TokenSampler:
    """The sampling state of one sequence: parameters, random numbers, and the token counts that penalties need."""

    def __init__(self, spec: SampleSpec, index: int, vocab_size: int, device: torch.device) -> None:
        self.spec = spec
        # Python hashes a text seed with SHA-512: the same random numbers in every process and on every platform.
        self._random = random.Random(f"{spec.seed}:{index}")
        self.uniform = self._random.random()
        """The number in [0, 1) that the next token is drawn with. A repeated draw gives the same token."""
        self.has_penalties = (
            spec.repetition_penalty != 1.0 or spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0
        )
        self.needs_ranking = 0 < spec.top_k < vocab_size or spec.top_p < 1.0
        self.counts_V = torch.zeros(vocab_size if self.has_penalties else 0, device=device)
        self.seen_V = torch.zeros(vocab_size if self.has_penalties else 0, dtype=torch.bool, device=device)
        if self.has_penalties:
            self.seen_V[torch.tensor(spec.prompt, device=device)] = True

    def record_token(self, token: int) -> None:
        """Count a drawn token for penalties, and take the random number of the next one."""
        self.uniform = self._random.random()
        if self.has_penalties:
            self.counts_V[token] += 1
            self.seen_V[token] = True


def sample_next_tokens(logits_BV: Tensor, samplers: Sequence[TokenSampler]) -> list[int]:
    """Return one token for every row. The logits must be finite (or -inf) and are not changed."""
    penalised = [row for row, sampler in enumerate(samplers) if sampler.has_penalties]
    if penalised:
        logits_BV = logits_BV.index_copy(
            0,
            torch.tensor(penalised, device=logits_BV.device),
            apply_penalties(logits_BV[penalised], [samplers[row] for row in penalised]),
        )
    greedy: list[int] = []
    unfiltered: list[int] = []
    filtered: list[int] = []
    for row, sampler in enumerate(samplers):
        kind = greedy if sampler.spec.temperature < COLDEST else filtered if sampler.needs_ranking else unfiltered
        kind.append(row)
    tokens = [0] * len(samplers)
    for rows, draw in ((greedy, _draw_greedy), (unfiltered, _draw_unfiltered), (filtered, _draw_filtered)):
        if rows:
            # Most batches are of one kind: then no copy is needed.
            rows_NV = logits_BV if len(rows) == len(samplers) else logits_BV[rows]
            for row, token in zip(rows, draw(rows_NV, [samplers[row] for row in rows]).tolist(), strict=True):
                tokens[row] = token
    return tokens


def apply_penalties(logits_NV: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """Return penalised logits: first repetition (tokens of prompt and sample; divides or multiplies), then frequency
    and presence (tokens of the sample; subtract)."""
    device = logits_NV.device
    seen_NV = torch.stack([sampler.seen_V for sampler in samplers])
    counts_NV = torch.stack([sampler.counts_V for sampler in samplers])
    repetition_N1 = _column([sampler.spec.repetition_penalty for sampler in samplers], device)
    frequency_N1 = _column([sampler.spec.frequency_penalty for sampler in samplers], device)
    presence_N1 = _column([sampler.spec.presence_penalty for sampler in samplers], device)
    repeated_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    logits_NV = torch.where(seen_NV, repeated_NV, logits_NV)
    return logits_NV - frequency_N1 * counts_NV - presence_N1 * (counts_NV > 0)


def rank_tokens(values_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of every row and their tokens [N, K], largest first; among equal values the
    lower token comes first, on every device."""
    if count >= values_NV.shape[1]:
        return values_NV.sort(dim=1, descending=True, stable=True)
    top_NK, tokens_NK = values_NV.topk(count, dim=1)
    last_N1 = top_NK[:, -1:]
    tied_N = ((values_NV >= last_N1).sum(1) > count) & (last_N1[:, 0] > -torch.inf)
    if bool(tied_N.any()):
        # topk may choose any of the equal values at the end; a stable sort takes those of the lowest tokens.
        sorted_, tokens = values_NV[tied_N].sort(dim=1, descending=True, stable=True)
        top_NK[tied_N], tokens_NK[tied_N] = sorted_[:, :count], tokens[:, :count]
    # Sorting by token and then stably by value puts equal values in the order of their tokens.
    tokens_NK, by_token_NK = tokens_NK.sort(dim=1)
    top_NK, by_value_NK = top_NK.gather(1, by_token_NK).sort(dim=1, descending=True, stable=True)
    return top_NK, tokens_NK.gather(1, by_value_NK)


def inverse_cdf(weights_NV: Tensor, uniforms_NK: Tensor) -> Tensor:
    """Return columns [N, K] drawn in proportion to `weights`, one for every uniform number in [0, 1).

    A number u is mapped to the first column whose cumulative weight exceeds u times the total. With one number per row
    the right block of columns is found first, then the column in it: a cumulative sum over the whole vocabulary takes
    longer than everything else in a draw.
    """
    size = weights_NV.shape[1]
    if uniforms_NK.shape[1] > 1:  # then gathering a block for every number would cost more than the cumulative sum
        sums_NV = weights_NV.cumsum(1, dtype=sum_dtype(weights_NV.device))
        aims_NK = _below(uniforms_NK.to(sums_NV.dtype) * sums_NV[:, -1:], sums_NV[:, -1:])
        return torch.searchsorted(sums_NV, aims_NK, right=True).clamp_(max=size - 1)
    padding = -size % BLOCK
    padded_NV = F.pad(weights_NV, (0, padding)) if padding else weights_NV
    weights_NCV = padded_NV.reshape(len(weights_NV), -1, BLOCK)
    sums_NC = weights_NCV.sum(2, dtype=sum_dtype(weights_NV.device)).cumsum(1)
    aims_NK = _below(uniforms_NK.to(sums_NC.dtype) * sums_NC[:, -1:], sums_NC[:, -1:])
    block_NK = torch.searchsorted(sums_NC, aims_NK, right=True).clamp_(max=sums_NC.shape[1] - 1)
    # What is left of the aim after the blocks before, searched in the cumulative sum of this block alone.
    before_NK = F.pad(sums_NC, (1, 0)).gather(1, block_NK)
    chosen_NKV = weights_NCV.gather(1, block_NK[..., None].expand(-1, -1, BLOCK))
    within_NKV = chosen_NKV.cumsum(2, dtype=sums_NC.dtype)
    aims_NK1 = _below((aims_NK - before_NK)[..., None], within_NKV[..., -1:])
    column_NK = torch.searchsorted(within_NKV, aims_NK1, right=True)[..., 0]
    return (block_NK * BLOCK + column_NK).clamp_(max=size - 1)


def _below(aims: Tensor, totals: Tensor) -> Tensor:
    """Keep aims below the totals: rounding may lift an aim to the total, beyond which no column has any weight."""
    return torch.minimum(aims, torch.nextafter(totals, torch.zeros_like(totals)))


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over a vocabulary: float32 is off by 1e-4 at its end. Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _draw_greedy(logits_NV: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    return logits_NV.argmax(1)  # the lowest of equal tokens


def _draw_unfiltered(logits_NV: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    return inverse_cdf(_scale_logits(logits_NV, samplers).exp_(), _uniforms(samplers, logits_NV.device))[:, 0]


def _draw_filtered(logits_NV: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """Draw from the top-k tokens, and among those from the top-p set (nucleus): the fewest best tokens whose
    probabilities sum to at least p.

    The loop ranks `TRIED_COUNTS` tokens, then all. A row is done when its top-k and top-p sets are known to lie within
    the ranked tokens; only the rows that are left go on to the next count.
    """
    size, device = logits_NV.shape[1], logits_NV.device
    scaled_NV = _scale_logits(logits_NV, samplers)
    limits = [sampler.spec.top_k if 0 < sampler.spec.top_k < size else size for sampler in samplers]
    limit_N1 = torch.tensor(limits, device=device)[:, None]
    top_p_N1 = _column([sampler.spec.top_p for sampler in samplers], device, sum_dtype(device))
    uniform_N1 = _uniforms(samplers, device)
    total_N1 = scaled_NV.exp().sum(1, keepdim=True, dtype=sum_dtype(device))

    tokens_N = torch.zeros(len(samplers), dtype=torch.long, device=device)
    left_N = torch.arange(len(samplers), device=device)  # the rows that are not done
    for count in (*(count for count in TRIED_COUNTS if count < size), size):
        values_NK, ids_NK = rank_tokens(scaled_NV[left_N], count)
        limit, top_p = limit_N1[left_N], top_p_N1[left_N]
        weights_NK = values_NK.to(sum_dtype(device)).exp()
        weights_NK *= torch.arange(count, device=device)[None] < limit
        # top-p counts probabilities within the top-k tokens if there is a top-k, else within the whole vocabulary.
        total = torch.where(limit < size, weights_NK.sum(1, keepdim=True), total_N1[left_N])
        sums_NK = weights_NK.cumsum(1)
        reaches_top_p_N = (sums_NK[:, -1:] / total >= top_p)[:, 0]
        is_done_N = (limit[:, 0] <= count) | ((limit[:, 0] == size) & reaches_top_p_N)
        # A token is in the top-p set if those before it do not reach p yet. The best token always is.
        is_allowed_NK = (sums_NK - weights_NK) / total < top_p
        is_allowed_NK[:, 0] = True
        column_N1 = inverse_cdf(weights_NK * is_allowed_NK, uniform_N1[left_N])
        drawn_N = ids_NK.gather(1, column_N1)[:, 0]
        tokens_N[left_N[is_done_N]] = drawn_N[is_done_N]
        left_N = left_N[~is_done_N]
        if not left_N.numel():
            break
    return tokens_N


def _scale_logits(logits_NV: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """Return logits divided by the temperature, with the best at 0, and -inf where min_p excludes a token."""
    device = logits_NV.device
    temperature_N1 = _column([sampler.spec.temperature for sampler in samplers], device)
    # The best is subtracted first: a tiny temperature would overflow otherwise.
    scaled_NV = (logits_NV - logits_NV.amax(1, keepdim=True)) / temperature_N1
    if any(sampler.spec.min_p > 0 for sampler in samplers):
        least_N1 = _column([sampler.spec.min_p for sampler in samplers], device).log()
        scaled_NV = scaled_NV.masked_fill(scaled_NV < least_N1.clamp(max=0), -torch.inf)
    return scaled_NV


def _uniforms(samplers: Sequence[TokenSampler], device: torch.device) -> Tensor:
    return _column([sampler.uniform for sampler in samplers], device, sum_dtype(device))


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
