"""From final hidden states to target log-probabilities, and back, a few hundred positions at a time.

Whole datums go together, so that their losses are known before the next ones' logits are made: what flows back is
computed while the probabilities are at hand, and no logits are made twice. A datum with more positions than fit at once
has its loss computed piece by piece where that is the same (all losses but gspo); else its logits are made again.

Axes: N positions of a chunk, E their targets, D model width, V vocabulary, R rank.
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

LOGITS = 2**25
"""Logits held at a time (128 MB in float32): 682 positions at 49,152 tokens."""
MOST_ROWS = 512
"""Positions at a time: more were not faster."""


@dataclass(frozen=True, slots=True)
class Head:
    """The unembedding of one model."""

    weight_VD: Tensor
    site: str

    @property
    def rows(self) -> int:
        return max(1, min(MOST_ROWS, LOGITS // self.weight_VD.shape[0]))


def score(head: Head, items: Sequence[Item], hidden_ND: Tensor, graded: int) -> Generator[None, None, Tensor]:
    """Give every item its outcome, a chunk between two yields. Returns d of the first `graded` hidden states."""
    dhidden_ND = torch.zeros_like(hidden_ND[:graded])
    at = 0
    for group in _chunks(items, head.rows):
        size = sum(item.length for item in group)
        rows = slice(at, at + size)
        d_ND = dhidden_ND[rows] if group[0].needs_gradient else None
        if size > head.rows:
            _long(head, group[0], hidden_ND[rows], d_ND)
        else:
            _short(head, group, hidden_ND[rows], d_ND)
        at += size
        yield
    return dhidden_ND


def _chunks(items: Sequence[Item], rows: int) -> Iterator[list[Item]]:
    """Neighbours that fit together, and agree on whether a gradient is needed."""
    group: list[Item] = []
    for item in items:
        size = sum(other.length for other in group) + item.length
        if group and (size > rows or group[0].needs_gradient is not item.needs_gradient):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


class Part(NamedTuple):
    """Positions of one item: all of them, or some that follow each other."""

    item: Item
    targets_NK: Tensor

    @property
    def size(self) -> int:
        return self.targets_NK.shape[0]


def _short(head: Head, items: Sequence[Item], hidden_ND: Tensor, d_ND: Tensor | None) -> None:
    """All positions of these items at once."""
    parts = [Part(item, item.datum.targets.view(item.length, -1)) for item in items]
    logs_NV = _logs(head, parts, hidden_ND)
    at, slopes = 0, []
    for item, targets_NK in parts:
        found = compute_loss(item, logs_NV[at : at + item.length].gather(1, targets_NK).view(item.datum.targets.shape))
        slopes.append(torch.zeros(targets_NK.shape) if found is None else found)
        at += item.length
    if d_ND is not None:
        _back(head, parts, hidden_ND, logs_NV, slopes, d_ND)


def _long(head: Head, item: Item, hidden_ND: Tensor, d_ND: Tensor | None) -> None:
    """One item, piece by piece."""
    pieces = [slice(at, at + head.rows) for at in range(0, item.length, head.rows)]
    targets_NK = item.datum.targets.view(item.length, -1)
    is_by_piece = d_ND is not None and item.loss.is_by_token
    found = []
    for piece in pieces:
        parts = [Part(item, targets_NK[piece])]
        logs_NV = _logs(head, parts, hidden_ND[piece])
        found.append(logs_NV.gather(1, targets_NK[piece]))
        if is_by_piece and d_ND is not None:
            _back(head, parts, hidden_ND[piece], logs_NV, [_slope(item, piece, found[-1])], d_ND[piece])
    d_lp = compute_loss(item, torch.cat(found).view(item.datum.targets.shape))
    if d_ND is not None and not is_by_piece and d_lp is not None:
        for piece in pieces:
            parts = [Part(item, targets_NK[piece])]
            logs_NV = _logs(head, parts, hidden_ND[piece])
            _back(head, parts, hidden_ND[piece], logs_NV, [d_lp[piece]], d_ND[piece])


def _slope(item: Item, piece: slice, lp_NK: Tensor) -> Tensor:
    """The gradient of a piece's part of the loss. What is wrong with it, `compute_loss` will say of the whole."""
    leaf = lp_NK.view(item.datum.targets[piece].shape).clone().requires_grad_()
    given = {name: value[piece] for name, value in item.datum.inputs.items()}
    try:
        with torch.enable_grad():
            term, _ = item.loss.compute(leaf, given, item.config)
    except EngineFault:
        return torch.zeros_like(leaf)
    return loss_gradient(term, leaf)


def _logs(head: Head, parts: Sequence[Part], hidden_ND: Tensor) -> Tensor:
    """Log-probabilities [N, V] of every token, the adapters' part included."""
    logits_NV = linear.linear(hidden_ND, head.weight_VD)
    for adapter, rows in _rows(parts):
        pair = adapter.lora.pairs.get(head.site)
        if pair is not None:
            low_NR = hidden_ND[rows] @ pair[0].detach().t() * adapter.spec.scale
            logits_NV[rows].addmm_(low_NR, pair[1].detach().t())
    return torch.log_softmax(logits_NV, 1, out=logits_NV)


def _back(
    head: Head, parts: Sequence[Part], hidden_ND: Tensor, logs_NV: Tensor, slopes: Sequence[Tensor], d_ND: Tensor
) -> None:
    """d of the hidden states, into `d_ND`, and of the adapters' unembedding. The log-probabilities are used up.

    d of a position's logits is Σ_k g_k·(onehot(target_k) − p): a row of probabilities times a number, and a few more.
    """
    slopes_NK = [found.view(part.size, -1) for part, found in zip(parts, slopes, strict=True)]
    dlogits_NV = logs_NV.exp_().mul_(-torch.cat([found.sum(1) for found in slopes_NK])[:, None])
    at = 0
    for part, found_NK in zip(parts, slopes_NK, strict=True):
        dlogits_NV[at : at + part.size].scatter_add_(1, part.targets_NK, found_NK)
        at += part.size
    d_ND.copy_(linear.backward(dlogits_NV, head.weight_VD))
    for adapter, rows in _rows(parts):
        pair = adapter.lora.pairs.get(head.site)
        if pair is not None:
            a_RD, b_VR = pair
            assert a_RD.grad is not None and b_VR.grad is not None
            scale, d_NV, x_ND = adapter.spec.scale, dlogits_NV[rows], hidden_ND[rows]
            low_NR, back_NR = x_ND @ a_RD.detach().t(), d_NV @ b_VR.detach() * scale
            b_VR.grad.t().add_(low_NR.t() @ d_NV, alpha=scale)
            a_RD.grad.addmm_(back_NR.t(), x_ND)
            d_ND[rows].addmm_(back_NR, a_RD.detach())


def _rows(parts: Sequence[Part]) -> Iterator[tuple[Adapter, slice]]:
    """Neighbours of one adapter together."""
    at = start = 0
    for number, part in enumerate(parts):
        at += part.size
        if number + 1 == len(parts) or parts[number + 1].item.adapter is not part.item.adapter:
            yield part.item.adapter, slice(start, at)
            start = at
