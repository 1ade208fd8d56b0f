"""Adapters that have equally many tokens, side by side: one batched product for all of them instead of one each.

For many short passes the calls, not the products, are what adapters cost. The A of all sites of a group stand below
each other, the B in blocks on a diagonal: the zeros cost less than further calls.

Axes: G adapters, T tokens of each, R rank, S sites of a group times rank, D in, O out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tinkex.engine.lora import LoraWeights, Segment
from tinkex.engine.packed.weights import Group

LONGEST = 256
"""Tokens of an adapter up to which calls cost more than zeros."""
KEPT_BYTES = 1 << 28
"""Of stacks that a bundle keeps for the backward pass; what is beyond is made again."""
MOST_RANKS = 1024
"""All ranks together: what is stacked for one group of sites stays small."""


class Bundle:
    """Neighbours in a pack: adapters of one rank on the same sites, with equally many tokens."""

    def __init__(self, segments: Sequence[Segment], *, keeps: bool = False) -> None:
        """`keeps`: a backward pass follows."""
        self._weights = [segment.weights for segment in segments]
        self._rank = self._weights[0].spec.rank
        self._scale = self._weights[0].spec.scale
        self._shape = (len(segments), segments[0].stop - segments[0].start, -1)
        self._tokens = slice(segments[0].start, segments[-1].stop)
        self._keeps = keeps
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}
        """Stacks of a group, by its first site, from its forward to its backward pass."""

    def forward(self, group: Group, x_ND: Tensor, y_NO: Tensor) -> None:
        """Adds the adapters' part to the output of a layer."""
        sites = self._sites(group)
        if sites:
            down_GSD, up_GSO = self._stacked(group, sites)
            low_GTS = torch.bmm(self._cut(x_ND), down_GSD.transpose(1, 2))
            self._cut(y_NO).baddbmm_(low_GTS, up_GSO)
            size = down_GSD.nbytes + up_GSO.nbytes
            if self._keeps and size + sum(a.nbytes + b.nbytes for a, b in self._kept.values()) <= KEPT_BYTES:
                self._kept[sites[0]] = down_GSD, up_GSO

    def backward(self, group: Group, x_ND: Tensor, dy_NO: Tensor, dx_ND: Tensor | None) -> None:
        """Adds to the adapters' gradients, and to what flows back."""
        sites = self._sites(group)
        if not sites:
            return
        x_GTD, dy_GTO = self._cut(x_ND), self._cut(dy_NO)
        down_GSD, up_GSO = self._kept.pop(sites[0]) if sites[0] in self._kept else self._stacked(group, sites)
        low_GTS = torch.bmm(x_GTD, down_GSD.transpose(1, 2))
        back_GTS = torch.bmm(dy_GTO, up_GSO.transpose(1, 2))
        grad_down_GSD = torch.bmm(back_GTS.transpose(1, 2), x_GTD)
        grad_up_GSO = torch.bmm(low_GTS.transpose(1, 2), dy_GTO)
        for rows, site in blocks(sites, self._rank):
            _add([one.pairs[site][0] for one in self._weights], grad_down_GSD[:, rows], 1.0)
            grad_up_GOR = grad_up_GSO[:, rows, group.places[site]].transpose(1, 2)
            _add([one.pairs[site][1] for one in self._weights], grad_up_GOR, self._scale)
        if dx_ND is not None:
            self._cut(dx_ND).baddbmm_(back_GTS, down_GSD)

    def _stacked(self, group: Group, sites: Sequence[str]) -> tuple[Tensor, Tensor]:
        return stacked_down(self._weights, sites), stacked_up(self._weights, sites, group.places)

    def _sites(self, group: Group) -> list[str]:
        return [site for site in group.places if site in self._weights[0].pairs]

    def _cut(self, all_N: Tensor) -> Tensor:
        return all_N[self._tokens].view(self._shape)


def stacked_down(weights: Sequence[LoraWeights], sites: Sequence[str]) -> Tensor:
    """The A of adapters of one rank [G, S, D]."""
    down_ND = torch.cat([one.pairs[site][0].detach() for one in weights for site in sites])
    return down_ND.view(len(weights), -1, down_ND.shape[1])


def stacked_up(weights: Sequence[LoraWeights], sites: Sequence[str], places: Mapping[str, slice]) -> Tensor:
    """Their B, with the scale [G, S, O]. `places` has all sites of the group."""
    spec = weights[0].spec
    up_GSO = torch.zeros(len(weights), len(sites) * spec.rank, max(place.stop for place in places.values()))
    for rows, site in blocks(sites, spec.rank):
        up_GOR = torch.stack([one.pairs[site][1].detach() for one in weights])
        torch.mul(up_GOR.transpose(1, 2), spec.scale, out=up_GSO[:, rows, places[site]])
    return up_GSO


def _add(parameters: Sequence[Tensor], gradients_G: Tensor, scale: float) -> None:
    held = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_add_(held, list(gradients_G.unbind()), alpha=scale)


def blocks(sites: Sequence[str], rank: int) -> Iterator[tuple[slice, str]]:
    """Which rows of a stack each site has."""
    for number, site in enumerate(sites):
        yield slice(number * rank, (number + 1) * rank), site


def bundles_of(segments: Sequence[Segment], *, keeps: bool = False) -> tuple[list[Bundle], list[Segment]]:
    """What can be bundled, and the segments that remain."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and _is_like(runs[-1][-1], segment) and segment.weights.spec.rank * len(runs[-1]) < MOST_RANKS:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    bundles = [Bundle(run, keeps=keeps) for run in runs if len(run) > 1]
    return bundles, [run[0] for run in runs if len(run) == 1]


def _is_like(one: Segment, other: Segment) -> bool:
    return (
        one.stop == other.start
        and one.stop - one.start == other.stop - other.start <= LONGEST
        and one.weights.spec.rank == other.weights.spec.rank
        and one.weights.pairs.keys() == other.weights.pairs.keys()
    )
