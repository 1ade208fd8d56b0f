"""What sampling needs of a model: to read prompts, and to take one step with all rows. Two of them, one contract.

`packed.decoder` serves Llama-shaped models, `GeneralDecoder` any other causal LM. Rows of one step may carry different
adapters, or none.

Axes: B rows, T tokens of a prompt, N positions of any kind, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights, Segment
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.kv_cache import RowCache, padding_mask

Acting = Sequence[LoraWeights | None]
"""Whose adapter acts on each row; None is the base model."""


class Reading(NamedTuple):
    """Tokens that follow what a prompt's cache holds already."""

    cache: RowCache
    at: int
    tokens: Sequence[int]
    weights: LoraWeights | None


class Next(NamedTuple):
    """What a row's next step needs: its last token, whose keys are not in the cache yet, and where it stands."""

    token: int
    position: int
    held: int
    """Tokens of its own in the batch's cache."""
    weights: LoraWeights | None
    prefix: RowCache | None = None
    """What it shares with others and has not copied."""


class Decoder(Protocol):
    can_share: bool
    """Whether rows may look at a prompt that they have not copied."""

    def read(self, readings: Sequence[Reading]) -> list[Tensor]:
        """Fill the caches; the hidden states of the new tokens [T, D], for each."""

    def step(self, cache: RowCache, rows: Sequence[Next]) -> Tensor:
        """One token of every row of the cache, in its order; hidden states [B, D]."""

    def logits(self, hidden_ND: Tensor, acting: Acting) -> Tensor:
        """Logits [N, V] in float32."""


class GeneralDecoder:
    """Through transformers' own modules. Implements `Decoder`."""

    can_share = False

    def __init__(self, model: Model) -> None:
        self._model = model

    def read(self, readings: Sequence[Reading]) -> list[Tensor]:
        return [self._read(*reading) for reading in readings]

    def _read(self, cache: RowCache, at: int, tokens: Sequence[int], weights: LoraWeights | None) -> Tensor:
        device = self._model.device
        positions_BT = torch.arange(at, at + len(tokens), device=device)[None]
        tokens_BT = torch.tensor([tokens], device=device)
        return self._model.hidden(tokens_BT, segments_of([weights]), positions_BT=positions_BT, cache=cache)[0]

    def step(self, cache: RowCache, rows: Sequence[Next]) -> Tensor:
        device = self._model.device
        hidden_BTD = self._model.hidden(
            torch.tensor([[row.token] for row in rows], device=device),
            segments_of([row.weights for row in rows]),
            mask_BT=padding_mask([row.held + 1 for row in rows], cache.width + 1, device),
            positions_BT=torch.tensor([[row.position] for row in rows], device=device),
            cache=cache,
        )
        return hidden_BTD[:, -1]

    def logits(self, hidden_ND: Tensor, acting: Acting) -> Tensor:
        return self._model.logits(hidden_ND, segments_of(acting))


def segments_of(acting: Acting) -> list[Segment]:
    """Neighbours of one adapter make one segment."""
    found: list[Segment] = []
    for row, weights in enumerate(acting):
        if weights is None:
            continue
        if found and found[-1].weights is weights and found[-1].stop == row:
            found[-1] = found[-1]._replace(stop=row + 1)
        else:
            found.append(Segment(weights, row, row + 1))
    return found
