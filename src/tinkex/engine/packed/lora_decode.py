"""The adapters of a decode step, stacked: one batched product per layer for all of them, whatever rows they have.

Ranks are filled up with zeros to the largest, and so are sites that an adapter has not. The scale is part of B. A stack
is made when the set of adapters changes, and kept while it stays.

Axes: B rows, G adapters, M rows of the adapter that has most, R rank, S sites of a group times rank, D in, O out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.packed.kernels.binding import Adapters, Kernels

FEW_RANKS = 256
"""All ranks together, filled up, up to which zeros do not matter."""
MOST_RANKS = 1024
"""Beyond, a second copy of the adapters takes too much memory (2 GB on SmolLM2)."""


class Stacked(NamedTuple):
    """One group of sites: A side by side, and B in blocks on the diagonal. The zeros cost less than further calls."""

    down: Tensor
    """[G, S, D] for the kernels, which go through it row by row, and [G, D, S] for torch."""
    up_GSO: Tensor
    columns: Tensor
    """Of every site that is used, its first column and the one behind its last."""
    rank: int


class Stacks:
    """Keeps what the last set of adapters needed."""

    def __init__(
        self, groups: Sequence[Mapping[str, slice]], widths: Sequence[int], found: Kernels | None = None
    ) -> None:
        """For every group its sites, with their rows of its output, and the width of its input."""
        self._groups, self._widths, self._kernels = groups, widths, found
        self._rows: tuple[LoraWeights | None, ...] = ()
        self._arranged = False
        self._of: tuple[LoraWeights, ...] = ()
        self._stacked: list[Stacked | None] = []
        self._rows_GM: Tensor | None = None
        """Which row stands where; None if rows stand as they are."""
        self._is_real_N: Tensor | None = None
        self._order_N = self._starts_G = torch.zeros(0, dtype=torch.long)
        """For the kernels: the rows of each adapter, and where each begins."""
        self._low = torch.empty(0)
        self._jobs: list[Adapters | None] = []
        self._shape = (0, 0)
        self._is_loop = False
        self._places: list[tuple[LoraWeights, Tensor]] = []
        """Adapters and their rows, where stacking would be wasteful."""

    def arrange(self, weights: Sequence[LoraWeights | None]) -> None:
        """Get ready for rows with these weights."""
        if self._arranged and _same(weights, self._rows):
            return
        self._rows, self._arranged = tuple(weights), False
        places: dict[int, list[int]] = {}
        acting: dict[int, LoraWeights] = {}
        for row, one in enumerate(weights):
            if one is not None:
                places.setdefault(id(one), []).append(row)
                acting[id(one)] = one
        found = tuple(acting.values())
        if not _same(found, self._of):
            self._of, self._stacked = (), []  # whatever happens now, no stack of others is left
            self._is_loop = is_wasteful([one.spec.rank for one in found])
            if not self._is_loop:
                self._stacked = [self._stack(found, *given) for given in zip(self._groups, self._widths, strict=True)]
            self._of = found
        self._places = [(one, torch.tensor(places[id(one)])) for one in found] if self._is_loop else []
        if self._kernels is not None:
            self._set_up(list(places.values()))
        else:
            self._line_up(list(places.values()), len(weights))
        self._arranged = True

    def _set_up(self, places: Sequence[Sequence[int]]) -> None:
        """What the kernels are told of every group."""
        self._order_N = torch.tensor([row for rows in places for row in rows])
        self._starts_G = torch.tensor([0, *accumulate(len(rows) for rows in places)])
        most = max((one.up_GSO.shape[1] for one in self._stacked if one is not None), default=0)
        self._low = torch.empty(len(self._rows) * most)
        self._jobs = [None if one is None else self._job(one) for one in self._stacked]

    def _job(self, stacked: Stacked) -> Adapters:
        return Adapters(
            low=self._low.data_ptr(),
            down=stacked.down.data_ptr(),
            up=stacked.up_GSO.data_ptr(),
            order=self._order_N.data_ptr(),
            starts=self._starts_G.data_ptr(),
            columns=stacked.columns.data_ptr(),
            adapters=len(self._of),
            sites=len(stacked.columns),
            rank=stacked.rank,
            width=stacked.down.shape[2],
            out=stacked.up_GSO.shape[2],
        )

    def _line_up(self, places: Sequence[Sequence[int]], count: int) -> None:
        """How torch takes the rows: by adapter, filled up to the one that has most."""
        most = max((len(rows) for rows in places), default=0)
        self._shape = (len(places), most)
        order = [row for rows in places for row in (*rows, *[-1] * (most - len(rows)))]
        if order == list(range(count)):
            self._rows_GM = self._is_real_N = None
        else:
            rows_N = torch.tensor(order)
            self._is_real_N = (rows_N >= 0).nonzero()[:, 0]
            self._rows_GM = rows_N.clamp_(min=0)

    def job(self, group: int) -> Adapters | None:
        """What the kernels are told of a group, so that a product adds the adapters' part itself; None: see `add`."""
        return self._jobs[group] if self._jobs else None

    def add(self, group: int, x_BD: Tensor, y_BO: Tensor) -> None:
        """Add the adapters' part to the output of a group, in place."""
        if self._is_loop:
            for weights, rows_N in self._places:
                _add(self._groups[group], weights, rows_N, x_BD, y_BO)
            return
        stacked = self._stacked[group] if self._of else None
        if stacked is None:
            return
        job = self.job(group)
        if self._kernels is not None and job is not None:
            self._kernels.adapt(x_BD.contiguous(), y_BO, job)
            return
        if self._rows_GM is None:  # rows stand by adapter already
            shape = self._shape
            low_GMS = torch.bmm(x_BD.view(*shape, -1), stacked.down)
            y_BO.view(*shape, -1).baddbmm_(low_GMS, stacked.up_GSO)
            return
        assert self._is_real_N is not None
        x_ND = x_BD.index_select(0, self._rows_GM)
        low_GMS = torch.bmm(x_ND.view(*self._shape, -1), stacked.down)
        delta_NO = torch.bmm(low_GMS, stacked.up_GSO).flatten(0, 1)
        y_BO.index_add_(0, self._rows_GM[self._is_real_N], delta_NO[self._is_real_N])

    def _stack(self, of: Sequence[LoraWeights], sites: Mapping[str, slice], width: int) -> Stacked | None:
        used = [site for site in sites if any(site in one.pairs for one in of)]
        if not used:
            return None
        rank = max(one.spec.rank for one in of)
        if all(one.spec.rank == rank and all(site in one.pairs for site in used) for one in of):
            down_GSD, up_GSO = stacked_down(of, used), stacked_up(of, used, sites)
        else:
            down_GSD, up_GSO = _filled_up(of, used, sites, rank, width)
        down = down_GSD if self._kernels is not None else down_GSD.transpose(1, 2).contiguous()
        return Stacked(down, up_GSO, torch.tensor([(sites[site].start, sites[site].stop) for site in used]), rank)


def stacked_down(weights: Sequence[LoraWeights], sites: Sequence[str]) -> Tensor:
    """The A of adapters of one rank [G, S, D]."""
    down_ND = torch.cat([one.pairs[site][0].detach() for one in weights for site in sites])
    return down_ND.view(len(weights), -1, down_ND.shape[1])


def stacked_up(weights: Sequence[LoraWeights], sites: Sequence[str], places: Mapping[str, slice]) -> Tensor:
    """Their B, with the scale [G, S, O]. `places` has all sites of the group."""
    spec = weights[0].spec
    up_GSO = torch.zeros(len(weights), len(sites) * spec.rank, max(place.stop for place in places.values()))
    for number, site in enumerate(sites):
        rows = slice(number * spec.rank, (number + 1) * spec.rank)
        up_GOR = torch.stack([one.pairs[site][1].detach() for one in weights])
        torch.mul(up_GOR.transpose(1, 2), spec.scale, out=up_GSO[:, rows, places[site]])
    return up_GSO


def _filled_up(
    of: Sequence[LoraWeights], used: Sequence[str], sites: Mapping[str, slice], rank: int, width: int
) -> tuple[Tensor, Tensor]:
    """Adapters of different ranks, or on different sites."""
    down_GSD = torch.zeros(len(of), len(used) * rank, width)
    up_GSO = torch.zeros(len(of), len(used) * rank, max(place.stop for place in sites.values()))
    for number, site in enumerate(used):
        for place, one in enumerate(of):
            if site in one.pairs:
                a_RD, b_OR = one.pairs[site]
                rows = slice(number * rank, number * rank + a_RD.shape[0])
                down_GSD[place, rows] = a_RD.detach()
                up_GSO[place, rows, sites[site]] = b_OR.detach().t() * one.spec.scale
    return down_GSD, up_GSO


def _same(some: Sequence[LoraWeights | None], others: Sequence[LoraWeights | None]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


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
