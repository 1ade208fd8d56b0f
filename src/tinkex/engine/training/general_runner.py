"""The general runner: runs any causal LM through transformers' own modules and autograd. Rows are padded on the right.

Axes: B rows of a micro-batch (one per item), T tokens of a row with padding, N tokens of all rows without padding, E
targets of those N (one or more per token), D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute_in_backward

from tinkex.engine.adapters.lora import Segment, segments_of
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training.runner import Item, compute_loss

LOGITS_AT_ONCE = 2**25
"""Logits in memory at a time (128 MB in float32)."""
POSITIONS_AT_ONCE = 512
"""Positions unembedded at a time: measured to be as fast as more."""


class GeneralRunner:
    """Implements `runner.Runner`."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def cost_tokens(self, count: int, longest: int, total: int) -> int:
        """Count padding as tokens, and everything twice: autograd keeps more than twice as much of a token as the
        packed runner."""
        return 2 * count * longest

    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        """Run the whole micro-batch in one turn: a pass through autograd cannot be interrupted."""
        yield from ()
        order = {adapter: index for index, adapter in enumerate(dict.fromkeys(item.adapter for item in items))}
        # Items without a gradient run in a pass of their own: otherwise autograd would keep all that they computed.
        for needs_gradient in (True, False):
            chosen = [item for item in items if item.needs_gradient is needs_gradient]
            if chosen:
                self.run_items(sorted(chosen, key=lambda item: order[item.adapter]), needs_gradient)

    def run_items(self, items: Sequence[Item], needs_gradient: bool) -> None:
        with torch.set_grad_enabled(needs_gradient):
            logprobs = self._target_logprobs(items)
            self._backward(logprobs, [compute_loss(item, lp) for item, lp in zip(items, logprobs, strict=True)])

    def _backward(self, logprobs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        pairs = [(lp, d_lp) for lp, d_lp in zip(logprobs, gradients, strict=True) if d_lp is not None]
        if pairs:
            torch.autograd.backward([lp for lp, _ in pairs], [d_lp for _, d_lp in pairs])

    def _target_logprobs(self, items: Sequence[Item]) -> list[Tensor]:
        """Return, for each item, the log-probabilities of its targets, in the targets' shape."""
        model = self._model
        weights = [item.adapter.lora for item in items]
        lengths = [item.length for item in items]
        # Causal attention never looks at padding on the right: no mask is needed.
        tokens_BT = torch.nn.utils.rnn.pad_sequence([item.tokens_T for item in items], batch_first=True)
        hidden_BTD = model.hidden(tokens_BT, segments_of(weights))
        # From here on padding is gone: token n of row b is at b * T + n of the flattened batch.
        indices_N = torch.cat([torch.arange(n) + row * tokens_BT.shape[1] for row, n in enumerate(lengths)])
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, indices_N.to(model.device))
        targets_per_token_N = torch.cat(
            [torch.full((item.length,), item.targets.numel() // item.length) for item in items]
        )
        targets_E = torch.cat([item.targets.flatten() for item in items])
        logprobs_E = self._unembed_targets(hidden_ND, targets_E, targets_per_token_N, segments_of(weights, lengths))
        parts = torch.split(logprobs_E, [item.targets.numel() for item in items])
        return [part.view(item.targets.shape) for part, item in zip(parts, items, strict=True)]

    def _unembed_targets(
        self, hidden_ND: Tensor, targets_E: Tensor, targets_per_token_N: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        """Return the log-probabilities [E] of all targets.

        Logits exist for a few positions at a time only. A backward pass computes them again instead of keeping them.
        """
        model = self._model
        # Token n owns the targets [ends[n], ends[n + 1]) of E; `token_of_target_E` is the inverse.
        ends = [0, *targets_per_token_N.cumsum(0).tolist()]
        token_of_target_E = torch.arange(len(hidden_ND)).repeat_interleave(targets_per_token_N).to(model.device)
        pieces = []
        step = max(1, min(POSITIONS_AT_ONCE, LOGITS_AT_ONCE // model.vocab_size))
        for start in range(0, len(hidden_ND), step):
            stop = min(start + step, len(hidden_ND))
            targets = slice(ends[start], ends[stop])
            acting = _cut_segments(segments, start, stop)

            def pick(hidden_ND: Tensor, rows_E: Tensor, targets_E: Tensor, acting: list[Segment] = acting) -> Tensor:
                logits_NV = model.logits(hidden_ND, acting)
                picked_E = logits_NV.flatten().gather(0, rows_E * logits_NV.shape[1] + targets_E)
                return picked_E - logits_NV.logsumexp(-1).index_select(0, rows_E)

            chunk = (hidden_ND[start:stop], token_of_target_E[targets] - start, targets_E[targets])
            if torch.is_grad_enabled():
                pieces.append(recompute_in_backward(pick, *chunk, use_reentrant=False, preserve_rng_state=False))
            else:
                pieces.append(pick(*chunk))
        return torch.cat(pieces)


def _cut_segments(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """Return the parts of the segments within rows [start, stop), counted from `start`."""
    return [
        Segment(weights, max(low, start) - start, min(high, stop) - start)
        for weights, low, high in segments
        if low < stop and high > start
    ]
