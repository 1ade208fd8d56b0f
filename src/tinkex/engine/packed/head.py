"""From final hidden states to the log-probabilities of target tokens, and back, a few hundred positions at a time.

Shapes: hidden [N, D] → logits [N, V] → log-softmax [N, V] → those of the targets [N, K]. V is large (49,152 on
SmolLM2), so the [N, V] matrix is what has to be kept small. Invariant: a chunk has whole datums, so that their losses,
and with them the gradients of the log-probabilities, are known while the chunk's probabilities are still in memory: no
logits are computed twice. A datum with more positions than fit into a chunk gets its loss in pieces where the loss is
a sum over tokens (all but gspo); else its logits are computed a second time for the backward pass.

Axes: N positions of a chunk, K targets of a position, D model width, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault
from tinkex.engine.packed import linear
from tinkex.engine.training.runner import Item, compute_loss, loss_gradient

MOST_LOGITS = 2**25
"""Logits in memory at a time (128 MB in float32): 682 positions at 49,152 tokens."""
MOST_ROWS = 512
"""Positions at a time: more were not faster."""


@dataclass(frozen=True, slots=True)
class Head:
    """The unembedding of one model."""

    weight_VD: Tensor
    site: str

    @property
    def rows(self) -> int:
        """Positions of a chunk."""
        return max(1, min(MOST_ROWS, MOST_LOGITS // self.weight_VD.shape[0]))


def score(head: Head, items: Sequence[Item], hidden_ND: Tensor, graded: int) -> Generator[None, None, Tensor]:
    """Give every item its result, yielding between chunks. Return the gradient of the first `graded` hidden states."""
    dhidden_ND = torch.zeros_like(hidden_ND[:graded])
    at = 0
    for chunk in _chunks(items, head.rows):
        size = sum(item.length for item in chunk)
        rows = slice(at, at + size)
        d_ND = dhidden_ND[rows] if chunk[0].needs_gradient else None
        if size > head.rows:
            _score_in_pieces(head, chunk[0], hidden_ND[rows], d_ND)
        else:
            _score_at_once(head, chunk, hidden_ND[rows], d_ND)
        at += size
        yield
    return dhidden_ND


def _chunks(items: Sequence[Item], rows: int) -> Iterator[list[Item]]:
    """Group neighbours that fit together and agree on whether a gradient is needed."""
    chunk: list[Item] = []
    for item in items:
        size = sum(member.length for member in chunk) + item.length
        if chunk and (size > rows or chunk[0].needs_gradient is not item.needs_gradient):
            yield chunk
            chunk = []
        chunk.append(item)
    if chunk:
        yield chunk


class HeadChunk(NamedTuple):
    """Positions of one item: all of them, or some that follow each other."""

    item: Item
    targets_NK: Tensor

    @property
    def size(self) -> int:
        return self.targets_NK.shape[0]


def _score_at_once(head: Head, items: Sequence[Item], hidden_ND: Tensor, d_ND: Tensor | None) -> None:
    """Score all positions of these items together."""
    parts = [HeadChunk(item, item.datum.targets.view(item.length, -1)) for item in items]
    logprobs_NV = _logprobs(head, parts, hidden_ND)
    at, slopes = 0, []
    for item, targets_NK in parts:
        logprobs_NK = logprobs_NV[at : at + item.length].gather(1, targets_NK)
        d_logprobs = compute_loss(item, logprobs_NK.view(item.datum.targets.shape))
        slopes.append(torch.zeros(targets_NK.shape) if d_logprobs is None else d_logprobs)
        at += item.length
    if d_ND is not None:
        _backward(head, parts, hidden_ND, logprobs_NV, slopes, d_ND)


def _score_in_pieces(head: Head, item: Item, hidden_ND: Tensor, d_ND: Tensor | None) -> None:
    """Score one item that has more positions than fit into a chunk."""
    pieces = [slice(at, at + head.rows) for at in range(0, item.length, head.rows)]
    targets_NK = item.datum.targets.view(item.length, -1)
    is_by_piece = d_ND is not None and item.loss.is_by_token
    logprobs = []
    for piece in pieces:
        parts = [HeadChunk(item, targets_NK[piece])]
        logprobs_NV = _logprobs(head, parts, hidden_ND[piece])
        logprobs.append(logprobs_NV.gather(1, targets_NK[piece]))
        if is_by_piece and d_ND is not None:
            slopes = [_piece_slope(item, piece, logprobs[-1])]
            _backward(head, parts, hidden_ND[piece], logprobs_NV, slopes, d_ND[piece])
    d_logprobs = compute_loss(item, torch.cat(logprobs).view(item.datum.targets.shape))
    if d_ND is not None and not is_by_piece and d_logprobs is not None:
        for piece in pieces:
            parts = [HeadChunk(item, targets_NK[piece])]
            logprobs_NV = _logprobs(head, parts, hidden_ND[piece])
            _backward(head, parts, hidden_ND[piece], logprobs_NV, [d_logprobs[piece]], d_ND[piece])


def _piece_slope(item: Item, piece: slice, logprobs_NK: Tensor) -> Tensor:
    """Return the gradient of a piece's part of the loss. `compute_loss` reports errors later, for the whole datum."""
    leaf = logprobs_NK.view(item.datum.targets[piece].shape).clone().requires_grad_()
    inputs = {name: value[piece] for name, value in item.datum.inputs.items()}
    try:
        with torch.enable_grad():
            term, _ = item.loss.compute(leaf, inputs, item.config)
    except EngineFault:
        return torch.zeros_like(leaf)
    return loss_gradient(term, leaf)


def _logprobs(head: Head, parts: Sequence[HeadChunk], hidden_ND: Tensor) -> Tensor:
    """Return the log-probabilities [N, V] of every token, with the adapters' part of the unembedding."""
    logits_NV = linear.linear(hidden_ND, head.weight_VD)
    for adapter, rows in _rows_by_adapter(parts):
        pair = adapter.lora.pairs.get(head.site)
        if pair is not None:
            low_NR = hidden_ND[rows] @ pair[0].detach().t() * adapter.spec.scale
            logits_NV[rows].addmm_(low_NR, pair[1].detach().t())
    return torch.log_softmax(logits_NV, 1, out=logits_NV)


def _backward(
    head: Head,
    parts: Sequence[HeadChunk],
    hidden_ND: Tensor,
    logprobs_NV: Tensor,
    slopes: Sequence[Tensor],
    d_ND: Tensor,
) -> None:
    """Write the gradient of the hidden states into `d_ND`, and add to those of the adapters' unembedding.

    With g_k the slope at target k of a position (the loss's gradient by that log-probability) and p its probabilities
    [V], the gradient of its logits is Σ_k g_k·(onehot(target_k) − p) = −(Σ_k g_k)·p, plus g_k at each target. So
    dlogits is the matrix of probabilities, scaled row by row, with a few numbers added: it is computed in place of
    `logprobs_NV`, which is overwritten.
    """
    slopes_NK = [part_slopes.view(part.size, -1) for part, part_slopes in zip(parts, slopes, strict=True)]
    dlogits_NV = logprobs_NV.exp_().mul_(-torch.cat([part_slopes.sum(1) for part_slopes in slopes_NK])[:, None])
    at = 0
    for part, part_slopes_NK in zip(parts, slopes_NK, strict=True):
        dlogits_NV[at : at + part.size].scatter_add_(1, part.targets_NK, part_slopes_NK)
        at += part.size
    d_ND.copy_(linear.linear_backward(dlogits_NV, head.weight_VD))
    for adapter, rows in _rows_by_adapter(parts):
        pair = adapter.lora.pairs.get(head.site)
        if pair is not None:  # the LoRA formulas of lora_train, with x the hidden states and dy the logits' gradient
            a_RD, b_VR = pair
            assert a_RD.grad is not None and b_VR.grad is not None
            scale, d_NV, x_ND = adapter.spec.scale, dlogits_NV[rows], hidden_ND[rows]
            low_NR, dlow_NR = x_ND @ a_RD.detach().t(), d_NV @ b_VR.detach() * scale
            b_VR.grad.t().add_(low_NR.t() @ d_NV, alpha=scale)
            a_RD.grad.addmm_(dlow_NR.t(), x_ND)
            d_ND[rows].addmm_(dlow_NR, a_RD.detach())


def _rows_by_adapter(parts: Sequence[HeadChunk]) -> Iterator[tuple[Adapter, slice]]:
    """Yield the rows of each adapter; neighbours of one adapter are joined."""
    at = start = 0
    for number, part in enumerate(parts):
        at += part.size
        if number + 1 == len(parts) or parts[number + 1].item.adapter is not part.item.adapter:
            yield part.item.adapter, slice(start, at)
            start = at
