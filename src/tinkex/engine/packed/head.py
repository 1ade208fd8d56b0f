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

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import Segment, segments_of
from tinkex.engine.contract import EngineFault
from tinkex.engine.packed import linear
from tinkex.engine.packed.weights import Weights
from tinkex.engine.training.runner import Item, compute_loss, loss_gradient

MOST_LOGITS = 2**25
"""Logits in memory at a time (128 MB in float32): 682 positions at 49,152 tokens."""
MOST_ROWS = 512
"""Positions at a time: more were not faster."""


def score(weights: Weights, items: Sequence[Item], hidden_ND: Tensor, graded: int) -> Generator[None, None, Tensor]:
    """Give every item its results, yielding between chunks. Return the gradient of the first `graded` hidden states."""
    dhidden_ND = torch.zeros_like(hidden_ND[:graded])
    most = max(1, min(MOST_ROWS, MOST_LOGITS // weights.head_VD.shape[0]))
    at = 0
    for chunk in _chunks(items, most):
        size = sum(item.length for item in chunk)
        rows = slice(at, at + size)
        d_ND = dhidden_ND[rows] if chunk[0].needs_gradient else None
        if size > most:
            _score_in_pieces(weights, chunk[0], hidden_ND[rows], d_ND, most)
        else:
            _score_at_once(weights, chunk, hidden_ND[rows], d_ND)
        at += size
        yield
    return dhidden_ND


def unembed(weights: Weights, hidden_ND: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return logits [N, V], with the adapters' part of the unembedding."""
    logits_NV = linear.linear(hidden_ND, weights.head_VD)
    for adapter, start, stop in segments:
        pair = adapter.pairs.get(weights.head_site)
        if pair is not None:
            low_NR = hidden_ND[start:stop] @ pair[0].t() * adapter.spec.scale
            logits_NV[start:stop].addmm_(low_NR, pair[1].t())
    return logits_NV


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


def _score_at_once(weights: Weights, items: Sequence[Item], hidden_ND: Tensor, d_ND: Tensor | None) -> None:
    """Score all positions of these items together."""
    segments = segments_of([item.adapter.lora for item in items], [item.length for item in items])
    targets = [item.targets.view(item.length, -1) for item in items]
    logprobs_NV = _logprobs(weights, hidden_ND, segments)
    at, slopes = 0, []
    for item, targets_NK in zip(items, targets, strict=True):
        logprobs_NK = logprobs_NV[at : at + item.length].gather(1, targets_NK)
        d_logprobs = compute_loss(item, logprobs_NK.view(item.targets.shape))
        slopes.append(torch.zeros(targets_NK.shape) if d_logprobs is None else d_logprobs)
        at += item.length
    if d_ND is not None:
        _backward(weights, segments, hidden_ND, logprobs_NV, targets, slopes, d_ND)


def _score_in_pieces(weights: Weights, item: Item, hidden_ND: Tensor, d_ND: Tensor | None, most: int) -> None:
    """Score one item that has more positions than fit into a chunk, `most` positions at a time."""
    pieces = [slice(at, min(at + most, item.length)) for at in range(0, item.length, most)]
    targets_NK = item.targets.view(item.length, -1)
    is_by_piece = d_ND is not None and item.loss.is_by_token
    logprobs = []
    for piece in pieces:
        segments = segments_of([item.adapter.lora], [piece.stop - piece.start])
        logprobs_NV = _logprobs(weights, hidden_ND[piece], segments)
        logprobs.append(logprobs_NV.gather(1, targets_NK[piece]))
        if is_by_piece and d_ND is not None:
            slopes = [_piece_slope(item, piece, logprobs[-1])]
            _backward(weights, segments, hidden_ND[piece], logprobs_NV, [targets_NK[piece]], slopes, d_ND[piece])
    d_logprobs = compute_loss(item, torch.cat(logprobs).view(item.targets.shape))
    if d_ND is not None and not is_by_piece and d_logprobs is not None:
        for piece in pieces:
            segments = segments_of([item.adapter.lora], [piece.stop - piece.start])
            logprobs_NV = _logprobs(weights, hidden_ND[piece], segments)
            slopes = [d_logprobs[piece]]
            _backward(weights, segments, hidden_ND[piece], logprobs_NV, [targets_NK[piece]], slopes, d_ND[piece])


def _piece_slope(item: Item, piece: slice, logprobs_NK: Tensor) -> Tensor:
    """Return the gradient of a piece's part of the loss. `compute_loss` reports errors later, for the whole datum."""
    leaf = logprobs_NK.view(item.targets[piece].shape).clone().requires_grad_()
    inputs = {name: value[piece] for name, value in item.inputs.items()}
    try:
        with torch.enable_grad():
            term, _ = item.loss.compute(leaf, inputs, item.config)
    except EngineFault:
        return torch.zeros_like(leaf)
    return loss_gradient(term, leaf)


def _logprobs(weights: Weights, hidden_ND: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return the log-probabilities [N, V] of every token."""
    logits_NV = unembed(weights, hidden_ND, segments)
    return torch.log_softmax(logits_NV, 1, out=logits_NV)


def _backward(
    weights: Weights,
    segments: Sequence[Segment],
    hidden_ND: Tensor,
    logprobs_NV: Tensor,
    targets: Sequence[Tensor],
    slopes: Sequence[Tensor],
    d_ND: Tensor,
) -> None:
    """Write the gradient of the hidden states into `d_ND`, and add to those of the adapters' unembedding.

    `targets` and `slopes` have those of one item after the other. With g_k the slope at target k of a position (the
    loss's gradient by that log-probability) and p its probabilities [V], the gradient of its logits is
    Σ_k g_k·(onehot(target_k) − p) = −(Σ_k g_k)·p, plus g_k at each target. So dlogits is the matrix of probabilities,
    scaled row by row, with a few numbers added: it is computed in place of `logprobs_NV`, which is overwritten.
    """
    slopes_NK = [d_logprobs.view(targets_NK.shape) for targets_NK, d_logprobs in zip(targets, slopes, strict=True)]
    dlogits_NV = logprobs_NV.exp_().mul_(-torch.cat([item_slopes.sum(1) for item_slopes in slopes_NK])[:, None])
    at = 0
    for targets_NK, item_slopes_NK in zip(targets, slopes_NK, strict=True):
        dlogits_NV[at : at + len(targets_NK)].scatter_add_(1, targets_NK, item_slopes_NK)
        at += len(targets_NK)
    d_ND.copy_(linear.linear_backward(dlogits_NV, weights.head_VD))
    for adapter, start, stop in segments:
        pair = adapter.pairs.get(weights.head_site)
        if pair is not None:  # the LoRA formulas of lora_train, with x the hidden states and dy the logits' gradient
            a_RD, b_VR = pair
            assert a_RD.grad is not None and b_VR.grad is not None
            scale, d_NV, x_ND = adapter.spec.scale, dlogits_NV[start:stop], hidden_ND[start:stop]
            low_NR, dlow_NR = x_ND @ a_RD.t(), d_NV @ b_VR * scale
            b_VR.grad.t().add_(low_NR.t() @ d_NV, alpha=scale)
            a_RD.grad.addmm_(dlow_NR.t(), x_ND)
            d_ND[start:stop].addmm_(dlow_NR, a_RD)
