"""The contract of a decoder: it prefills prompts, and decodes one token of all rows of a batch in a step.

Two decoders keep it and pass the same tests: `packed.decoder.PackedDecoder` for Llama-shaped models in float32 on a
CPU, and `GeneralDecoder` for any other causal LM. Rows of one step may use different adapters, or none.

Axes: B rows, T tokens of a prompt, N positions of any kind, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights, segments_of
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.kv_cache import KVCache, padding_mask

RowAdapters = Sequence[LoraWeights | None]
"""The adapter of each row; None is the base model."""


class PromptChunk(NamedTuple):
    """The next tokens of a prompt: `start` tokens of it are in its cache already."""

    cache: KVCache
    start: int
    tokens: Sequence[int]
    weights: LoraWeights | None


class RowInput(NamedTuple):
    """The input of one row for one step."""

    token: int
    """The row's last token. Its keys and values are not in the cache yet."""
    position: int
    """The token's position in the text."""
    cached_tokens: int
    """Tokens of the row in the batch's own cache."""
    weights: LoraWeights | None
    prefix: KVCache | None = None
    """The cache of the prompt, if the row reads the shared one instead of a copy."""


class Decoder(Protocol):
    can_share_prefix: bool
    """Whether rows may read a prompt's cache that they have not copied."""

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[Tensor]:
        """Add the tokens to the caches of their prompts. Returns the hidden states [T, D] of each chunk."""

    def step(self, cache: KVCache, rows: Sequence[RowInput]) -> Tensor:
        """Decode one token of every row of the cache, in the cache's order. Returns hidden states [B, D]."""

    def logits(self, hidden_ND: Tensor, adapters: RowAdapters) -> Tensor:
        """Return logits [N, V] in float32."""


class GeneralDecoder:
    """Decodes any causal LM through transformers' own modules."""

    can_share_prefix = False

    def __init__(self, model: Model) -> None:
        self._model = model

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[Tensor]:
        return [self._prefill_chunk(*chunk) for chunk in chunks]

    def _prefill_chunk(self, cache: KVCache, start: int, tokens: Sequence[int], weights: LoraWeights | None) -> Tensor:
        device = self._model.device
        positions_BT = torch.arange(start, start + len(tokens), device=device)[None]
        tokens_BT = torch.tensor([tokens], device=device)
        return self._model.hidden(tokens_BT, segments_of([weights]), positions_BT=positions_BT, cache=cache)[0]

    def step(self, cache: KVCache, rows: Sequence[RowInput]) -> Tensor:
        device = self._model.device
        hidden_BTD = self._model.hidden(
            torch.tensor([[row.token] for row in rows], device=device),
            segments_of([row.weights for row in rows]),
            mask_BT=padding_mask([row.cached_tokens + 1 for row in rows], cache.width + 1, device),
            positions_BT=torch.tensor([[row.position] for row in rows], device=device),
            cache=cache,
        )
        return hidden_BTD[:, -1]

    def logits(self, hidden_ND: Tensor, adapters: RowAdapters) -> Tensor:
        return self._model.logits(hidden_ND, segments_of(adapters))
