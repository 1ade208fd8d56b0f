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


class Stacked(NamedTuple):
    """One group of sites. `ups`: a site's rows of the fused output, its columns of `down`, and its B."""

    down_GDS: Tensor
    ups: list[tuple[slice, slice, Tensor]]


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
            self._of = found
            self._stacked = [self._stack(*given) for given in zip(self._groups, self._widths, strict=True)]
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
        stacked = self._stacked[group] if self._of else None
        if stacked is None:
            return
        x_ND = x_BD if self._rows_GM is None else x_BD.index_select(0, self._rows_GM)
        low_GMS = torch.bmm(x_ND.view(*self._shape, -1), stacked.down_GDS)
        for place, columns, up_GRO in stacked.ups:
            delta_NO = torch.bmm(low_GMS[:, :, columns], up_GRO).flatten(0, 1)
            if self._rows_GM is None:
                y_BO[:, place] += delta_NO
            else:
                assert self._is_real_N is not None
                real_N = self._is_real_N
                y_BO[:, place].index_add_(0, self._rows_GM[real_N], delta_NO[real_N])

    def _stack(self, sites: Mapping[str, slice], width: int) -> Stacked | None:
        used = [site for site in sites if any(site in one.pairs for one in self._of)]
        if not used:
            return None
        rank = max(one.spec.rank for one in self._of)
        down_GSD = torch.zeros(len(self._of), len(used) * rank, width)
        ups = []
        for number, site in enumerate(used):
            up_GRO = torch.zeros(len(self._of), rank, sites[site].stop - sites[site].start)
            for place, one in enumerate(self._of):
                if site in one.pairs:
                    a_RD, b_OR = one.pairs[site]
                    down_GSD[place, number * rank : number * rank + a_RD.shape[0]] = a_RD.detach()
                    up_GRO[place, : a_RD.shape[0]] = b_OR.detach().t() * one.spec.scale
            ups.append((sites[site], slice(number * rank, (number + 1) * rank), up_GRO))
        return Stacked(down_GSD.transpose(1, 2).contiguous(), ups)
