"""LoRA as layer maths: y = x·Wᵀ + (32/rank)·(x·Aᵀ)·Bᵀ, for any rows of a batch and any number of adapters.

The base model's modules stay as they are: a hook on each linear layer adds the low-rank part of the adapters that the
rows in the batch belong to. The layers are found by their path in the model, so that any causal LM works.

Axes: B rows of the batch, T tokens, N flat tokens, D in, O out, R rank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinkex.engine.contract import LoraSpec


class Role(enum.StrEnum):
    """A group of layers that a client's flag switches on and off; the value is the flag."""

    ATTENTION = "train_attn"
    MLP = "train_mlp"
    UNEMBED = "train_unembed"


class Site(NamedTuple):
    """A linear layer that an adapter may train; `name` is its path in the model, as in PEFT's files."""

    name: str
    role: Role
    d_in: int
    d_out: int


def group_sizes(sites: Iterable[Site]) -> dict[str, int]:
    """Return how many numbers an adapter of rank 1 has in each group of layers."""
    sizes = {role.value: 0 for role in Role}
    for site in sites:
        sizes[site.role.value] += site.d_in + site.d_out
    return sizes


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """The weights of one adapter: site → (A [R, D], B [O, R]). Compared by identity."""

    spec: LoraSpec
    pairs: Mapping[str, tuple[Tensor, Tensor]]


class Segment(NamedTuple):
    """Rows [start, stop) of a batch's first axis use one adapter; rows of no segment use the base model alone."""

    weights: LoraWeights
    start: int
    stop: int


def segments_of(
    weights: Iterable[LoraWeights | None], sizes: Iterable[int] = repeat(1), start: int = 0
) -> list[Segment]:
    """Return the segments of a batch from row `start` on. Entry i is the adapter of the next `sizes[i]` rows, None for
    the base model; neighbours with the same adapter make one segment."""
    segments: list[Segment] = []
    for adapter, size in zip(weights, sizes, strict=False):
        stop = start + size
        if adapter is not None:
            if segments and segments[-1].weights is adapter and segments[-1].stop == start:
                segments[-1] = segments[-1]._replace(stop=stop)
            else:
                segments.append(Segment(adapter, start, stop))
        start = stop
    return segments


def find_sites(model: Any) -> list[Site]:
    """Return the layers of a causal LM that can have adapters, in the model's own order."""
    sites = []
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        role = Role.UNEMBED if module is head else _role_of(name, module)
        if role is not None:
            sites.append(Site(name, role, int(module.in_features), int(module.out_features)))
    return sites


def _role_of(name: str, module: nn.Module) -> Role | None:
    if not isinstance(module, nn.Linear):
        return None
    parents = name.lower().split(".")[:-1]
    if any("attn" in part or "attention" in part for part in parents):
        return Role.ATTENTION
    if any(word in part for part in parents for word in ("mlp", "feed_forward", "ffn", "moe", "expert")):
        return Role.MLP
    return None


class LoraHooks:
    """Adds the low-rank part of the active adapters to the output of every site. One pass at a time."""

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        self._segments: Sequence[Segment] = ()
        modules = dict(model.named_modules())
        for site in sites:
            modules[site.name].register_forward_hook(self._hook(site.name))

    @contextmanager
    def active(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Use these adapters inside the `with` block. Recomputation in a backward pass needs it as well."""
        before, self._segments = self._segments, segments
        try:
            yield
        finally:
            self._segments = before

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            acting = [segment for segment in self._segments if name in segment.weights.pairs]
            return add_lora(name, args[0], output, acting) if acting else output

        return add


def add_lora(name: str, x_BTD: Tensor, y_BTO: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return a layer's output plus the adapters' low-rank part. Segments are ranges of the first axis."""
    if len(segments) == 1 and segments[0].start == 0 and segments[0].stop == x_BTD.shape[0]:
        return y_BTO + lora_delta(name, x_BTD, segments[0].weights).to(y_BTO.dtype)
    # Rows between the segments are passed on unchanged.
    pieces, done = [], 0
    for segment in sorted(segments, key=lambda segment: segment.start):
        rows = slice(segment.start, segment.stop)
        pieces += [y_BTO[done : segment.start]] if segment.start > done else []
        pieces.append(y_BTO[rows] + lora_delta(name, x_BTD[rows], segment.weights).to(y_BTO.dtype))
        done = segment.stop
    if done < y_BTO.shape[0]:
        pieces.append(y_BTO[done:])
    return torch.cat(pieces)


def lora_delta(name: str, x_BTD: Tensor, weights: LoraWeights) -> Tensor:
    """Return scale·(x·Aᵀ)·Bᵀ of one adapter at one site."""
    a_RD, b_OR = weights.pairs[name]
    # Scaled between the two products, where the tensor is narrow.
    return nn.functional.linear(nn.functional.linear(x_BTD.to(a_RD.dtype), a_RD) * weights.spec.scale, b_OR)
