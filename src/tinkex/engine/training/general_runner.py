"""The general runner: any causal LM, through transformers' own modules and autograd. Rows are padded on the right.

Axes: B rows of a micro-batch, T tokens, N their tokens without padding, E targets of those, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from tinkex.engine.adapters.lora import Segment
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training import datum_tensors
from tinkex.engine.training.runner import Item, weigh

LOGITS = 2**25
"""Logits held at a time (128 MB in float32)."""
MOST_ROWS = 512
"""Positions unembedded at a time: measured to be as fast as more."""


class GeneralRunner:
    """Implements `runner.Runner`."""

    name = "general"

    def __init__(self, model: Model) -> None:
        self._model = model

    def size(self, count: int, longest: int, total: int) -> int:
        """Padding counts, and all twice: autograd keeps more than twice as much of a token as the packed runner."""
        return 2 * count * longest

    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        """All at once: autograd cannot be left in the middle."""
        yield from ()
        order = {id(adapter): place for place, adapter in enumerate(dict.fromkeys(item.adapter for item in items))}
        # Rows without a gradient go through a pass of their own: autograd would keep all that they computed.
        for needs_gradient in (True, False):
            chosen = [item for item in items if item.needs_gradient is needs_gradient]
            if chosen:
                self._batch(sorted(chosen, key=lambda item: order[id(item.adapter)]), needs_gradient)

    def _batch(self, items: Sequence[Item], needs_gradient: bool) -> None:
        with torch.set_grad_enabled(needs_gradient):
            found = self._logprobs(items)
            slopes = [weigh(item, logprobs) for item, logprobs in zip(items, found, strict=True)]
            if needs_gradient:
                backward = [(lp, d) for lp, d in zip(found, slopes, strict=True) if d is not None]
                if backward:
                    torch.autograd.backward([lp for lp, _ in backward], [d for _, d in backward])

    def _logprobs(self, items: Sequence[Item]) -> list[Tensor]:
        """For each item the log-probabilities of its targets, in their shape.

        Logits exist only for a few positions at a time; a backward pass computes them again instead of keeping them.
        """
        model, data = self._model, [item.datum for item in items]
        tokens_BT = datum_tensors.pad(data)
        lengths = [item.length for item in items]
        hidden_BTD = model.hidden(tokens_BT, _segments(items, [1] * len(items)))
        places_N = torch.cat([torch.arange(n) + row * tokens_BT.shape[1] for row, n in enumerate(lengths)])
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, places_N.to(model.device))
        # A position has as many targets as its datum's rows do: `ends_N` is where they end among all of them.
        counts_N = torch.cat([torch.full((n,), d.targets.numel() // n) for n, d in zip(lengths, data, strict=True)])
        ends_N = [0, *counts_N.cumsum(0).tolist()]
        rows_E = torch.arange(len(counts_N)).repeat_interleave(counts_N).to(model.device)
        targets_E = torch.cat([datum.targets.flatten() for datum in data])
        segments = _segments(items, lengths)
        pieces = []
        step = max(1, min(MOST_ROWS, LOGITS // model.vocab_size))
        for start in range(0, len(hidden_ND), step):
            stop = min(start + step, len(hidden_ND))
            wanted = slice(ends_N[start], ends_N[stop])
            acting = _cut(segments, start, stop)

            def pick(hidden_ND: Tensor, rows_E: Tensor, targets_E: Tensor, acting: list[Segment] = acting) -> Tensor:
                logits_NV = model.logits(hidden_ND, acting)
                picked_E = logits_NV.flatten().gather(0, rows_E * logits_NV.shape[1] + targets_E)
                return picked_E - logits_NV.logsumexp(-1).index_select(0, rows_E)

            given = (hidden_ND[start:stop], rows_E[wanted] - start, targets_E[wanted])
            if torch.is_grad_enabled():
                pieces.append(recomputed(pick, *given, use_reentrant=False, preserve_rng_state=False))
            else:
                pieces.append(pick(*given))
        parts = torch.split(torch.cat(pieces), [datum.targets.numel() for datum in data])
        return [part.view(datum.targets.shape) for part, datum in zip(parts, data, strict=True)]


def _segments(items: Sequence[Item], sizes: Sequence[int]) -> list[Segment]:
    """Which rows belong to which adapter: neighbours of one adapter make one segment."""
    found: list[Segment] = []
    at = 0
    for item, size in zip(items, sizes, strict=True):
        if found and found[-1].weights is item.adapter.lora:
            found[-1] = found[-1]._replace(stop=at + size)
        else:
            found.append(Segment(item.adapter.lora, at, at + size))
        at += size
    return found


def _cut(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    return [
        Segment(weights, max(low, start) - start, min(high, stop) - start)
        for weights, low, high in segments
        if low < stop and high > start
    ]
