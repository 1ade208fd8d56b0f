"""The packed runner: micro-batches of Llama-shaped models, forward and backward by hand, with no padding.

Items with a gradient stand first, sorted by adapter and length: the backward pass runs over those alone. Between layers
others may take a turn. Layers whose memory would be over the budget keep their input alone and are computed again.

Axes: N tokens of the pack, D model width.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import Segment
from tinkex.engine.packed import layer as layers
from tinkex.engine.packed import norm_rope_gate
from tinkex.engine.packed.attention import Run, runs_of
from tinkex.engine.packed.head import Head, score
from tinkex.engine.packed.layer import Kept, Pack
from tinkex.engine.packed.lora_train import Deltas
from tinkex.engine.packed.weights import Weights
from tinkex.engine.training.runner import Item

KEPT_BYTES = 1_500_000_000
"""What all layers together may keep for the backward pass."""


class PackedRunner:
    """Implements `runner.Runner`."""

    name = "packed"

    def __init__(self, weights: Weights, *, kept_bytes: int = KEPT_BYTES) -> None:
        self.weights = weights
        self._head = Head(weights.head_VD, weights.head_site)
        self._kept_bytes = kept_bytes

    def cost_tokens(self, count: int, longest: int, total: int) -> int:
        return total

    def hidden(self, tokens_T: Tensor) -> Tensor:
        """The base model's final hidden states of one sequence [T, D]."""
        weights, x_TD = self.weights, self.weights.embedded(tokens_T)
        pack = Pack(Deltas((), len(tokens_T)), runs_of([len(tokens_T)]), *weights.angles(torch.arange(len(tokens_T))))
        for layer in weights.layers:
            x_TD, _ = layers.forward(weights, layer, pack, x_TD)
        return norm_rope_gate.norm(weights, x_TD, weights.norm_D)

    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        """Yields between layers and between chunks of the unembedding."""
        passing = self._pass(_sorted(items))
        while True:
            with torch.no_grad():
                try:
                    next(passing)
                except StopIteration:
                    return
            yield

    def _pass(self, items: Sequence[Item]) -> Generator[None, None, None]:
        weights = self.weights
        graded = sum(item.length for item in items if item.needs_gradient)
        pack = _pack(weights, items, graded)
        x_ND = weights.embedded(torch.cat([item.datum.tokens_T for item in items]))
        kept: list[Kept | Tensor] = []
        # What is kept are views of what all tokens have: that is what it costs.
        whole = self._whole_layers(x_ND.shape[0] if graded else 0)
        for number, layer in enumerate(weights.layers):
            before_ND = x_ND
            x_ND, found = layers.forward(weights, layer, pack, x_ND)
            if graded:
                kept.append(_cut(found, pack.runs, graded) if number < whole else before_ND[:graded])
            del found, before_ND
            yield
        hidden_ND = norm_rope_gate.norm(weights, x_ND, weights.norm_D)
        d_ND = yield from score(self._head, items, hidden_ND, graded)
        if graded:
            d_ND = norm_rope_gate.norm_backward(weights, x_ND[:graded], weights.norm_D, d_ND, None)
            if hidden_ND.shape[0] > graded:
                pack = _pack(weights, items, graded, graded)
            del x_ND, hidden_ND
            yield from self._backward(pack, kept, d_ND)

    def _backward(self, pack: Pack, kept: list[Kept | Tensor], d_ND: Tensor) -> Generator[None, None, None]:
        weights = self.weights
        for number in reversed(range(len(weights.layers))):
            layer, found = weights.layers[number], kept.pop()
            if isinstance(found, Tensor):
                _, found = layers.forward(weights, layer, pack, found)
            d_ND = layers.backward(weights, layer, pack, found, d_ND, needs_dx=number > 0)
            del found
            yield

    def _whole_layers(self, tokens: int) -> int:
        """How many layers may keep all that their backward pass needs."""
        weights = self.weights
        layer = weights.layers[0]
        width = weights.embedding_VD.shape[1]
        wide = layer.qkv.weight_OD.shape[0] + layer.gate_up.weight_OD.shape[0] + layer.out.weight_OD.shape[1]
        per_layer = 4 * tokens * (2 * width + wide + weights.heads)
        return len(weights.layers) if per_layer == 0 else int(self._kept_bytes // per_layer)


def _sorted(items: Sequence[Item]) -> list[Item]:
    """Those with a gradient first, then by adapter (in the order of their coming), the longest first."""
    order = {id(adapter): place for place, adapter in enumerate(dict.fromkeys(item.adapter for item in items))}
    return sorted(items, key=lambda item: (not item.needs_gradient, order[id(item.adapter)], -item.length))


def _pack(weights: Weights, items: Sequence[Item], graded: int, stop: int | None = None) -> Pack:
    """What all layers share, for the tokens up to `stop`."""
    segments: list[Segment] = []
    lengths: list[int] = []
    at = 0
    for item in items:
        if stop is not None and at >= stop:
            break
        last = segments[-1] if segments else None
        # Those with and without a gradient stay apart, even of one adapter.
        if last is not None and last.weights is item.adapter.lora and at != graded:
            segments[-1] = last._replace(stop=at + item.length)
        else:
            segments.append(Segment(item.adapter.lora, at, at + item.length))
        lengths.append(item.length)
        at += item.length
    cos_N1W, sin_N1W = weights.angles(torch.cat([torch.arange(length) for length in lengths]))
    return Pack(Deltas(segments, at, graded, found=weights.kernels), _runs(lengths, graded), cos_N1W, sin_N1W)


def _runs(lengths: Sequence[int], graded: int) -> list[Run]:
    """Runs that do not cross the end of the tokens with a gradient."""
    at, split = 0, 0
    while at < graded:
        at += lengths[split]
        split += 1
    rest = [run._replace(start=run.start + graded) for run in runs_of(lengths[split:])]
    return runs_of(lengths[:split]) + rest


def _cut(kept: Kept, runs: Sequence[Run], graded: int) -> Kept:
    """Only what belongs to tokens with a gradient."""
    if kept.x_ND.shape[0] == graded:
        return kept
    return Kept(
        kept.x_ND[:graded],
        None if kept.raw_qk_NO is None else kept.raw_qk_NO[:graded],
        kept.qkv_NO[:graded],
        kept.gathered_NO[:graded],
        [total for total, run in zip(kept.totals, runs, strict=True) if run.start < graded],
        kept.middle_ND[:graded],
        kept.gate_up_NF[:graded],
    )
