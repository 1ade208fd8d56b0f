"""The packed runner: micro-batches of Llama-shaped models, forward and backward by hand, without padding.

The tokens of all items are concatenated [N, D]. Items that need a gradient come first, sorted by adapter and length,
so the backward pass runs over the first `graded` tokens alone, and an adapter's tokens are one segment. Invariant: a
layer's saved activations are the inputs of its backward pass; a layer over the memory budget saves its input [graded,
D] alone, and its forward pass is computed again when the backward pass reaches it. `run` yields between layers, so
that the engine can let sampling or another tenant take a turn.

Axes: N tokens of the pack, T tokens of one sequence, D model width, W width of a head.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import Segment, segments_of
from tinkex.engine.packed import layer as layers
from tinkex.engine.packed import norm_rope_gate
from tinkex.engine.packed.attention import SequenceBlock, blocks_of
from tinkex.engine.packed.head import score
from tinkex.engine.packed.layer import Pack, SavedActivations
from tinkex.engine.packed.lora_train import PackedLora
from tinkex.engine.packed.weights import Weights
from tinkex.engine.training.runner import Item

SAVED_BYTES = 1_500_000_000
"""What all layers together may save for the backward pass."""


class PackedRunner:
    """Implements `training.runner.Runner`."""

    def __init__(self, weights: Weights, *, saved_bytes: int = SAVED_BYTES) -> None:
        self.weights = weights
        self._saved_bytes = saved_bytes

    def cost_tokens(self, count: int, longest: int, total: int) -> int:
        return total

    def hidden(self, tokens_T: Tensor) -> Tensor:
        """Return the base model's final hidden states of one sequence [T, D]."""
        weights, x_TD = self.weights, self.weights.embedded(tokens_T)
        length = len(tokens_T)
        pack = Pack(PackedLora((), length), blocks_of([length]), *weights.angles(torch.arange(length)))
        for layer in weights.layers:
            x_TD, _ = layers.forward(weights, layer, pack, x_TD)
        return norm_rope_gate.rmsnorm(weights, x_TD, weights.norm_D)

    @torch.no_grad()  # off inside each step and restored at each yield, where other code runs
    def run(self, items: Sequence[Item]) -> Generator[None, None, None]:
        """Compute the items' losses and gradients; yields between layers and between chunks of the unembedding."""
        weights, items = self.weights, _sorted(items)
        graded = sum(item.length for item in items if item.needs_gradient)
        pack = _pack(weights, items, graded)
        x_ND = weights.embedded(torch.cat([item.tokens_T for item in items]))
        saved: list[SavedActivations | Tensor] = []
        # What is saved are views into the activations of all tokens, so it costs the memory of all of them.
        whole_layers = self._whole_layers(x_ND.shape[0] if graded else 0)
        for number, layer in enumerate(weights.layers):
            before_ND = x_ND
            x_ND, activations = layers.forward(weights, layer, pack, x_ND)
            if graded:
                is_whole = number < whole_layers
                saved.append(_cut(activations, pack.blocks, graded) if is_whole else before_ND[:graded])
            del activations, before_ND
            yield
        hidden_ND = norm_rope_gate.rmsnorm(weights, x_ND, weights.norm_D)
        d_ND = yield from score(weights, items, hidden_ND, graded)
        if graded:
            d_ND = norm_rope_gate.rmsnorm_backward(weights, x_ND[:graded], weights.norm_D, d_ND, None)
            if hidden_ND.shape[0] > graded:
                pack = _pack(weights, [item for item in items if item.needs_gradient], graded)
            del x_ND, hidden_ND
            yield from self._backward(pack, saved, d_ND)

    def _backward(
        self, pack: Pack, saved: list[SavedActivations | Tensor], d_ND: Tensor
    ) -> Generator[None, None, None]:
        weights = self.weights
        for number in reversed(range(len(weights.layers))):
            layer, activations = weights.layers[number], saved.pop()
            if isinstance(activations, Tensor):  # the layer's input alone
                _, activations = layers.forward(weights, layer, pack, activations)
            d_ND = layers.backward(weights, layer, pack, activations, d_ND, needs_dx=number > 0)
            del activations
            yield

    def _whole_layers(self, tokens: int) -> int:
        """Return how many layers may save all that their backward pass needs."""
        weights = self.weights
        layer = weights.layers[0]
        width = weights.embedding_VD.shape[1]
        wide = layer.qkv.weight_OD.shape[0] + layer.gate_up.weight_OD.shape[0] + layer.out.weight_OD.shape[1]
        per_layer = 4 * tokens * (2 * width + wide + weights.heads)
        return len(weights.layers) if per_layer == 0 else int(self._saved_bytes // per_layer)


def _sorted(items: Sequence[Item]) -> list[Item]:
    """Order the items: those with a gradient first, then by adapter (in order of arrival), the longest first."""
    order = {adapter: index for index, adapter in enumerate(dict.fromkeys(item.adapter for item in items))}
    return sorted(items, key=lambda item: (not item.needs_gradient, order[item.adapter], -item.length))


def _pack(weights: Weights, items: Sequence[Item], graded: int) -> Pack:
    """Return what all layers share. Tokens with and without a gradient have no segment and no block in common."""
    segments: list[Segment] = []
    blocks: list[SequenceBlock] = []
    count = 0
    for needs_gradient in (True, False):
        chosen = [item for item in items if item.needs_gradient is needs_gradient]
        lengths = [item.length for item in chosen]
        segments += segments_of([item.adapter.lora for item in chosen], lengths, count)
        blocks += blocks_of(lengths, count)
        count += sum(lengths)
    cos_N1W, sin_N1W = weights.angles(torch.cat([torch.arange(item.length) for item in items]))
    return Pack(PackedLora(segments, count, graded, kernels=weights.kernels), blocks, cos_N1W, sin_N1W)


def _cut(saved: SavedActivations, blocks: Sequence[SequenceBlock], graded: int) -> SavedActivations:
    """Return the activations of the tokens with a gradient alone."""
    if saved.x_ND.shape[0] == graded:
        return saved
    logsumexps = [part for part, block in zip(saved.logsumexps, blocks, strict=True) if block.start < graded]
    tensors = {name: part[:graded] for name, part in saved._asdict().items() if isinstance(part, Tensor)}
    return saved._replace(**tensors, logsumexps=logsumexps)
