"""Low-rank adapters as layer maths: y = x·Wᵀ + (32/rank)·(x·Aᵀ)·Bᵀ, for any rows of a batch and any number of adapters.

The base model's modules stay as they are; a hook on each linear layer adds what the adapters of the rows in the batch
say. Which layers those are is found by where they stand in the model, so that any causal LM will do.

Axes: B rows of the batch, T tokens, N flat tokens, D in, O out, R rank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinkex.engine.contract import LoraSpec


class Role(enum.StrEnum):
    """What a client's flags switch on and off."""

    ATTENTION = "train_attn"
    MLP = "train_mlp"
    UNEMBED = "train_unembed"


class Site(NamedTuple):
    """A linear layer that an adapter may act on; `name` is its path in the model, as in PEFT's files."""

    name: str
    role: Role
    d_in: int
    d_out: int


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The numbers of one adapter: site → (A [R, D], B [O, R])."""

    spec: LoraSpec
    pairs: Mapping[str, tuple[Tensor, Tensor]]


class Segment(NamedTuple):
    """Rows [start, stop) of a batch's first axis belong to one adapter; rows of no segment are the base model's."""

    weights: LoraWeights
    start: int
    stop: int


def sites_of(model: Any) -> list[Site]:
    """The layers of a causal LM that take adapters, in the model's own order."""
    found = []
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        role = Role.UNEMBED if module is head else _role(name, module)
        if role is not None:
            found.append(Site(name, role, int(module.in_features), int(module.out_features)))
    return found


def _role(name: str, module: nn.Module) -> Role | None:
    if not isinstance(module, nn.Linear):
        return None
    parents = name.lower().split(".")[:-1]
    if any("attn" in part or "attention" in part for part in parents):
        return Role.ATTENTION
    if any(word in part for part in parents for word in ("mlp", "feed_forward", "ffn", "moe", "expert")):
        return Role.MLP
    return None


def chosen(sites: Sequence[Site], spec: LoraSpec) -> list[Site]:
    """Those sites that the client's flags switch on."""
    return [site for site in sites if getattr(spec, site.role.value)]


class Hooks:
    """Adds the active adapters' part to the output of every site. One pass at a time."""

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        self._segments: Sequence[Segment] = ()
        modules = dict(model.named_modules())
        for site in sites:
            modules[site.name].register_forward_hook(self._hook(site.name))

    @contextmanager
    def active(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Within, these adapters act. Recomputation in a backward pass needs it as well."""
        before, self._segments = self._segments, segments
        try:
            yield
        finally:
            self._segments = before

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            acting = [segment for segment in self._segments if name in segment.weights.pairs]
            return apply(name, args[0], output, acting) if acting else output

        return add


def apply(name: str, x_BTD: Tensor, y_BTO: Tensor, segments: Sequence[Segment]) -> Tensor:
    """The layer's output with the adapters' part; the first axis is the one that segments cut."""
    if len(segments) == 1 and segments[0].start == 0 and segments[0].stop == x_BTD.shape[0]:
        return y_BTO + delta(name, x_BTD, segments[0].weights).to(y_BTO.dtype)
    pieces, at = [], 0
    for segment in sorted(segments, key=lambda segment: segment.start):
        rows = slice(segment.start, segment.stop)
        pieces += [y_BTO[at : segment.start]] if segment.start > at else []
        pieces.append(y_BTO[rows] + delta(name, x_BTD[rows], segment.weights).to(y_BTO.dtype))
        at = segment.stop
    if at < y_BTO.shape[0]:
        pieces.append(y_BTO[at:])
    return torch.cat(pieces)


def delta(name: str, x_BTD: Tensor, weights: LoraWeights) -> Tensor:
    a_RD, b_OR = weights.pairs[name]
    # Scaled where it is narrow.
    return nn.functional.linear(nn.functional.linear(x_BTD.to(a_RD.dtype), a_RD) * weights.spec.scale, b_OR)
