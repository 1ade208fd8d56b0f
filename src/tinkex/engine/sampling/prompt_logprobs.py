"""Computes what a sampling request asks about its prompt: log-probabilities, top-k, targets, alternatives.

Hidden states arrive chunk by chunk as the prompt is prefilled. Only the positions that the request asks about are
unembedded, a few at a time: the logits of a whole prompt are never in memory together.

Axes: T positions of a chunk, N requested positions, K ranked or drawn tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tinkex.engine.contract import EngineFault, SampleSpec
from tinkex.engine.sampling.next_token import inverse_cdf, rank_tokens, sum_dtype
from tinkex.types.packed import pack_floats
from tinkex.types.sampling import TopkLogprobs

LOGITS_AT_ONCE = 1 << 23
"""Entries of [N, V] in memory at a time: 32 MB of float32."""


class PromptLogprobs:
    """The results about one prompt.

    A token is predicted at the position before it: entry i of `logprobs` and `topk` comes from the hidden state at
    i - 1. `targets` and `alternatives` have no entry for the first token: theirs for token i is at i - 1.
    """

    def __init__(self, spec: SampleSpec) -> None:
        size = len(spec.prompt)
        self._spec = spec
        self._first = 1 if spec.last_n is None else max(1, size - spec.last_n)
        """The first requested entry of `logprobs` and `topk`."""
        self._random = random.Random(f"{spec.seed}:alternatives")
        self.logprobs: list[float | None] | None = [None] * size if spec.prompt_logprobs else None
        self.targets: list[list[float]] | None = None if spec.targets is None else [[] for _ in spec.targets]
        self._topk = TokenMatrix(size)
        self._alternatives = TokenMatrix(size - 1)

    @property
    def is_requested(self) -> bool:
        """Whether the request asks anything about its prompt."""
        return self._needs_topk or self._needs_alternatives or self.logprobs is not None or self.targets is not None

    @property
    def topk(self) -> TopkLogprobs | None:
        return self._topk.packed() if self._needs_topk else None

    @property
    def alternatives(self) -> TopkLogprobs | None:
        return self._alternatives.packed() if self._needs_alternatives else None

    @property
    def packed_targets(self) -> bytes | None:
        return None if self.targets is None else pack_floats([value for row in self.targets for value in row])

    @property
    def _needs_topk(self) -> bool:
        return self._spec.topk_prompt > 0

    @property
    def _needs_alternatives(self) -> bool:
        return self._spec.alt_k > 0

    def add_hidden(self, hidden_TD: Tensor, start: int, unembed: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """Compute the entries that the hidden states at prompt positions start, start + 1, … predict."""
        entries = [start + row + 1 for row in range(hidden_TD.shape[0]) if self._needs_entry(start + row + 1)]
        step = max(1, LOGITS_AT_ONCE // vocab_size)
        for first in range(0, len(entries), step):
            chunk = entries[first : first + step]
            rows_N = torch.tensor(chunk, device=hidden_TD.device) - 1 - start
            self._set_entries(unembed(hidden_TD[rows_N]), chunk)

    def _needs_entry(self, entry: int) -> bool:
        if entry >= len(self._spec.prompt):
            return False  # the last position predicts the first token of the sample
        if self._needs_alternatives:
            return True
        if (self.logprobs is not None or self._needs_topk) and entry >= self._first:
            return True
        return self._spec.targets is not None and bool(self._spec.targets[entry - 1])

    def _set_entries(self, logits_NV: Tensor, entries: list[int]) -> None:
        """Set every requested result of these entries; row n of the logits predicts token `entries[n]`."""
        # A log-probability is a logit minus this number; log_softmax over all of V would cost another [N, V].
        log_sum_N = logits_NV.logsumexp(1)
        if not bool(log_sum_N.isfinite().all()):
            raise divergence_fault()
        rows = [row for row, entry in enumerate(entries) if entry >= self._first]
        if self.logprobs is not None and rows:
            tokens = [self._spec.prompt[entries[row]] for row in rows]
            for row, logprob in zip(rows, _gather_logprobs(logits_NV, log_sum_N, rows, tokens), strict=True):
                self.logprobs[entries[row]] = logprob
        if self._needs_topk and rows:
            values_NK, tokens_NK = rank_tokens(logits_NV[rows], self._spec.topk_prompt)
            self._topk.set_rows([entries[row] for row in rows], tokens_NK, values_NK - log_sum_N[rows, None])
        if self.targets is not None and self._spec.targets is not None:
            requested = [(row, token) for row, entry in enumerate(entries) for token in self._spec.targets[entry - 1]]
            rows, tokens = [row for row, _ in requested], [token for _, token in requested]
            for row, logprob in zip(rows, _gather_logprobs(logits_NV, log_sum_N, rows, tokens), strict=True):
                self.targets[entries[row] - 1].append(logprob)
        if self._needs_alternatives:
            tokens_NK = self._draw_alternatives(logits_NV, log_sum_N)
            logprobs_NK = logits_NV.gather(1, tokens_NK) - log_sum_N[:, None]
            self._alternatives.set_rows([entry - 1 for entry in entries], tokens_NK, logprobs_NK)

    def _draw_alternatives(self, logits_NV: Tensor, log_sum_N: Tensor) -> Tensor:
        count, device = self._spec.alt_k, logits_NV.device
        uniforms = [[self._random.random() for _ in range(count)] for _ in range(logits_NV.shape[0])]
        uniforms_NK = torch.tensor(uniforms, dtype=sum_dtype(device), device=device)
        return inverse_cdf((logits_NV - log_sum_N[:, None]).exp_(), uniforms_NK)


class TokenMatrix:
    """Tokens and their log-probabilities at every position, which fill up row by row; fillers where there is none."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._tokens_TK: Tensor | None = None
        self._logprobs_TK: Tensor | None = None

    def set_rows(self, rows: list[int], tokens_NK: Tensor, logprobs_NK: Tensor) -> None:
        if self._tokens_TK is None or self._logprobs_TK is None:  # not before: a request that waits takes no memory
            shape = (self._length, tokens_NK.shape[1])
            self._tokens_TK = torch.zeros(shape, dtype=torch.int32)
            self._logprobs_TK = torch.full(shape, TopkLogprobs.FILLER)
        self._tokens_TK[rows] = tokens_NK.int().cpu()
        self._logprobs_TK[rows] = logprobs_NK.float().cpu()

    def packed(self) -> TopkLogprobs:
        if self._tokens_TK is None or self._logprobs_TK is None:
            return TopkLogprobs.from_buffers(b"", b"", self._length, 0)
        tokens, logprobs = self._tokens_TK.numpy().tobytes(), self._logprobs_TK.numpy().tobytes()
        return TopkLogprobs.from_buffers(tokens, logprobs, *self._tokens_TK.shape)


def divergence_fault() -> EngineFault:
    """Return the error for logits that are not finite."""
    return EngineFault(
        "The model gives no finite probabilities with these weights: training has diverged. "
        "Sample from an earlier checkpoint, and train with a lower learning rate or with grad_clip_norm."
    )


def _gather_logprobs(logits_NV: Tensor, log_sum_N: Tensor, rows: list[int], tokens: list[int]) -> list[float]:
    """Return the log-probability of tokens[i] in row rows[i], for every i."""
    if not rows:
        return []
    rows_K, tokens_K = torch.tensor([rows, tokens], device=logits_NV.device)
    logprobs: list[float] = (logits_NV[rows_K, tokens_K] - log_sum_N[rows_K]).tolist()
    return logprobs
