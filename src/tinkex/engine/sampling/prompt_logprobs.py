"""What a sampling request wants to know about its prompt: log-probabilities, top-k, targets, alternatives.

Hidden states come in chunk by chunk as the prompt is prefilled. Only positions that somebody asked for go through the
unembedding, a few at a time: the logits of a whole prompt are never held.

Axes: T positions of a chunk, N positions that are wanted, K ranked or drawn tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tinkex.engine.contract import EngineFault, SampleSpec
from tinkex.engine.sampling.next_token import invert, ranked, wide

LOGITS_AT_ONCE = 1 << 23
"""Entries of [N, V] held at a time: 32 MB of float32."""


class PromptScores:
    """The position before a token predicts it: entry i of every list comes from the hidden state at i - 1."""

    def __init__(self, spec: SampleSpec) -> None:
        size = len(spec.prompt)
        self._spec = spec
        self._first = 1 if spec.last_n is None else max(1, size - spec.last_n)
        """The first entry of prompt_logprobs and topk_prompt that is wanted."""
        self._random = random.Random(f"{spec.seed}:alternatives")
        self.logprobs: list[float | None] | None = [None] * size if spec.prompt_logprobs else None
        self.topk: list[list[tuple[int, float]] | None] | None = [None] * size if spec.topk_prompt > 0 else None
        self.targets: list[list[float]] | None = None if spec.targets is None else [[] for _ in spec.targets]
        self.alternatives: list[list[tuple[int, float]]] | None = (
            [[] for _ in range(size - 1)] if spec.alt_k > 0 else None
        )

    @property
    def is_wanted(self) -> bool:
        """Whether anything is asked about the prompt."""
        return any(part is not None for part in (self.logprobs, self.topk, self.targets, self.alternatives))

    def read(self, hidden_TD: Tensor, start: int, unembed: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """Take in the hidden states at prompt positions start, start + 1, …"""
        entries = [start + row + 1 for row in range(hidden_TD.shape[0]) if self._is_wanted(start + row + 1)]
        most = max(1, LOGITS_AT_ONCE // vocab_size)
        for at in range(0, len(entries), most):
            some = entries[at : at + most]
            rows_N = torch.tensor(some, device=hidden_TD.device) - 1 - start
            self._score(unembed(hidden_TD[rows_N]), some)

    def _is_wanted(self, entry: int) -> bool:
        if entry >= len(self._spec.prompt):
            return False  # the last position predicts the first token of the sample
        if self.alternatives is not None:
            return True
        if (self.logprobs is not None or self.topk is not None) and entry >= self._first:
            return True
        return self._spec.targets is not None and bool(self._spec.targets[entry - 1])

    def _score(self, logits_NV: Tensor, entries: list[int]) -> None:
        total_N = logits_NV.logsumexp(1)
        if not bool(total_N.isfinite().all()):
            raise not_finite()
        chosen = [place for place, entry in enumerate(entries) if entry >= self._first]
        if self.logprobs is not None and chosen:
            tokens = [self._spec.prompt[entries[place]] for place in chosen]
            for place, value in zip(chosen, _gather(logits_NV, total_N, chosen, tokens), strict=True):
                self.logprobs[entries[place]] = value
        if self.topk is not None and chosen:
            values_NK, tokens_NK = ranked(logits_NV[chosen], self._spec.topk_prompt)
            pairs = pairs_of(tokens_NK, values_NK - total_N[chosen, None])
            for place, row in zip(chosen, pairs, strict=True):
                self.topk[entries[place]] = row
        if self.targets is not None and self._spec.targets is not None:
            asked = [(place, token) for place, entry in enumerate(entries) for token in self._spec.targets[entry - 1]]
            places, tokens = [place for place, _ in asked], [token for _, token in asked]
            for place, value in zip(places, _gather(logits_NV, total_N, places, tokens), strict=True):
                self.targets[entries[place] - 1].append(value)
        if self.alternatives is not None:
            self._draw(self.alternatives, logits_NV, total_N, entries)

    def _draw(
        self, found: list[list[tuple[int, float]]], logits_NV: Tensor, total_N: Tensor, entries: list[int]
    ) -> None:
        count, device = self._spec.alt_k, logits_NV.device
        uniforms = [[self._random.random() for _ in range(count)] for _ in entries]
        uniforms_NK = torch.tensor(uniforms, dtype=wide(device), device=device)
        tokens_NK = invert((logits_NV - total_N[:, None]).exp_(), uniforms_NK)
        for entry, row in zip(
            entries, pairs_of(tokens_NK, logits_NV.gather(1, tokens_NK) - total_N[:, None]), strict=True
        ):
            found[entry - 1] = row


def pairs_of(tokens_NK: Tensor, logprobs_NK: Tensor) -> list[list[tuple[int, float]]]:
    return [
        list(zip(tokens, logprobs, strict=True))
        for tokens, logprobs in zip(tokens_NK.tolist(), logprobs_NK.tolist(), strict=True)
    ]


def not_finite() -> EngineFault:
    return EngineFault(
        "The model gives no finite probabilities with these weights: training has diverged. "
        "Sample from an earlier checkpoint, and train with a lower learning rate or with grad_clip_norm."
    )


def _gather(logits_NV: Tensor, total_N: Tensor, places: list[int], tokens: list[int]) -> list[float]:
    if not places:
        return []
    at = torch.tensor([places, tokens], device=logits_NV.device)
    found: list[float] = (logits_NV[at[0], at[1]] - total_N[at[0]]).tolist()
    return found
