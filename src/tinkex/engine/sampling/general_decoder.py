"""The general decoder: samples from any causal LM through transformers' own modules.

Axes: B rows, T tokens, N positions of any kind, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights, segments_of
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.decoder import PromptChunk, RowAdapters, RowInput
from tinkex.engine.sampling.kv_cache import KVCache, padding_mask


class GeneralDecoder:
    """Implements `decoder.Decoder`."""

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
