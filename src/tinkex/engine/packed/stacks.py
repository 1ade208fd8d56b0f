"""The adapters of a decode step, stacked: one batched product per layer for all of them, whatever rows they have.

Ranks are filled up with zeros to the largest, and so are sites that an adapter has not. The scale is part of B. A stack
is made when the set of adapters changes, and kept while it stays.

Axes: B rows, G adapters, M rows of the adapter that has most, R rank, S sites of a group times rank, D in, O out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.lora import LoraWeights
from tinkex.engine.packed.bundles import stacked_down, stacked_up

FEW_RANKS = 256
"""All ranks together, filled up, up to which zeros do not matter."""
MOST_RANKS = 1024
"""Beyond, a second copy of the adapters takes too much memory (2 GB on SmolLM2)."""


class Stacked(NamedTuple):
    """One group of sites: A side by side, and B in blocks on the diagonal. The zeros cost less than further calls."""

    down_GDS: Tensor
    up_GSO: Tensor


class Stacks:
    """Keeps what the last set of adapters needed."""

    def __init__(self, groups: Sequence[Mapping[str, slice]], widths: Sequence[int]) -> None:
        """For every group its sites, with their rows of its output, and the width of its input."""
        self._groups, self._widths = groups, widths
        self._of: tuple[LoraWeights, ...] = ()
        self._stacked: list[Stacked | None] = []
        self._rows_GM: Tensor | None = None
        """Which row stands where; None if rows stand as they are."""
        self._is_real_N: Tensor | None = None
        self._shape = (0, 0)
        self._is_loop = False
        self._places: list[tuple[LoraWeights, Tensor]] = []
        """Adapters and their rows, where stacking would be wasteful."""

    def arrange(self, weights: Sequence[LoraWeights | None]) -> None:
        """Get ready for rows with these weights."""
        places: dict[int, list[int]] = {}
        acting: dict[int, LoraWeights] = {}
        for row, one in enumerate(weights):
            if one is not None:
                places.setdefault(id(one), []).append(row)
                acting[id(one)] = one
        found = tuple(acting.values())
        if len(found) != len(self._of) or any(one is not other for one, other in zip(found, self._of, strict=True)):
            self._of, self._stacked = (), []  # whatever happens now, no stack of others is left
            self._is_loop = is_wasteful([one.spec.rank for one in found])
            if not self._is_loop:
                self._stacked = [self._stack(found, *given) for given in zip(self._groups, self._widths, strict=True)]
            self._of = found
        self._places = [(one, torch.tensor(places[id(one)])) for one in found] if self._is_loop else []
        most = max((len(rows) for rows in places.values()), default=0)
        self._shape = (len(found), most)
        order = [row for rows in places.values() for row in (*rows, *[-1] * (most - len(rows)))]
        if order == list(range(len(weights))):
            self._rows_GM = self._is_real_N = None
        else:
            rows_N = torch.tensor(order)
            self._is_real_N = (rows_N >= 0).nonzero()[:, 0]
            self._rows_GM = rows_N.clamp_(min=0)

    def add(self, group: int, x_BD: Tensor, y_BO: Tensor) -> None:
        """Add the adapters' part to the output of a group, in place."""
        if self._is_loop:
            for weights, rows_N in self._places:
                _add(self._groups[group], weights, rows_N, x_BD, y_BO)
            return
        stacked = self._stacked[group] if self._of else None
        if stacked is None:
            return
        if self._rows_GM is None:  # rows stand by adapter already
            shape = self._shape
            low_GMS = torch.bmm(x_BD.view(*shape, -1), stacked.down_GDS)
            y_BO.view(*shape, -1).baddbmm_(low_GMS, stacked.up_GSO)
            return
        assert self._is_real_N is not None
        x_ND = x_BD.index_select(0, self._rows_GM)
        low_GMS = torch.bmm(x_ND.view(*self._shape, -1), stacked.down_GDS)
        delta_NO = torch.bmm(low_GMS, stacked.up_GSO).flatten(0, 1)
        y_BO.index_add_(0, self._rows_GM[self._is_real_N], delta_NO[self._is_real_N])

    @staticmethod
    def _stack(of: Sequence[LoraWeights], sites: Mapping[str, slice], width: int) -> Stacked | None:
        used = [site for site in sites if any(site in one.pairs for one in of)]
        if not used:
            return None
        rank = max(one.spec.rank for one in of)
        if all(one.spec.rank == rank and all(site in one.pairs for site in used) for one in of):
            return Stacked(stacked_down(of, used).transpose(1, 2).contiguous(), stacked_up(of, used, sites))
        down_GSD = torch.zeros(len(of), len(used) * rank, width)
        up_GSO = torch.zeros(len(of), len(used) * rank, max(place.stop for place in sites.values()))
        for number, site in enumerate(used):
            for place, one in enumerate(of):
                if site in one.pairs:
                    a_RD, b_OR = one.pairs[site]
                    rows = slice(number * rank, number * rank + a_RD.shape[0])
                    down_GSD[place, rows] = a_RD.detach()
                    up_GSO[place, rows, sites[site]] = b_OR.detach().t() * one.spec.scale
        return Stacked(down_GSD.transpose(1, 2).contiguous(), up_GSO)


def _add(sites: Mapping[str, slice], weights: LoraWeights, rows_N: Tensor, x_BD: Tensor, y_BO: Tensor) -> None:
    """One adapter's part, site by site."""
    for site, place in sites.items():
        if site in weights.pairs:
            a_RD, b_OR = weights.pairs[site]
            low_NR = x_BD[rows_N] @ a_RD.detach().t() * weights.spec.scale
            y_BO[:, place].index_add_(0, rows_N, low_NR @ b_OR.detach().t())


def is_wasteful(ranks: Sequence[int]) -> bool:
    """Whether stacks would be mostly zeros, or too large: then adapters act one by one."""
    filled = max(ranks, default=0) * len(ranks)
    return filled > MOST_RANKS or filled > max(FEW_RANKS, 2 * sum(ranks))
