"""LoRA of a decode step: the adapters of all rows are stacked, so that a group of layers costs one batched product.

Row b gets y += s·(x·Aᵀ)·Bᵀ with the A and B of its own adapter. To batch this, ranks are padded with zeros to the
largest, sites that an adapter does not train are zeros, and the scale s is multiplied into B. A stack is built when
the set of adapters changes, and reused while it stays the same: building it costs as much as many steps.

Axes: B rows, G adapters, M rows of the adapter that has the most, N = G·M padded rows, R rank, S sites of a group times
rank, D in, O out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.packed.kernels.binding import DecodeLora, Kernels

FEW_RANKS = 256
"""Sum of all padded ranks up to which the padding costs nothing that can be measured."""
MOST_RANKS = 1024
"""Sum of all padded ranks above which the second copy of the adapters takes too much memory (2 GB on SmolLM2)."""


class LoraStack(NamedTuple):
    """The adapters on one group of layers: A below each other, B in blocks on the diagonal.

    The zeros beside the diagonal cost less than one call per site.
    """

    down: Tensor
    """A: [G, S, D] for the kernels, which read it row by row, and [G, D, S] for torch."""
    up_GSO: Tensor
    """s·Bᵀ."""
    columns: Tensor
    """Of every site that is used: its first column and the one after its last."""
    rank: int


class StackedLora:
    """Applies the adapters of decode steps; keeps the stacks of the last set of adapters."""

    def __init__(
        self, groups: Sequence[Mapping[str, slice]], widths: Sequence[int], kernels: Kernels | None = None
    ) -> None:
        """`groups`: per group of layers its sites and their columns of its output; `widths`: of the groups' inputs."""
        self._groups, self._widths, self._kernels = groups, widths, kernels
        self._rows: tuple[LoraWeights | None, ...] = ()
        self._is_prepared = False
        self._adapters: tuple[LoraWeights, ...] = ()
        self._stacks: list[LoraStack | None] = []
        # For torch: the rows in the order [G, M] (None: they are in that order already), and which of them are real.
        self._rows_N: Tensor | None = None
        self._real_N: Tensor | None = None
        self._shape = (0, 0)
        # For the kernels: the rows adapter by adapter, where each adapter's begin, memory for x·Aᵀ, the arguments.
        self._order_B = self._starts_G = torch.zeros(0, dtype=torch.long)
        self._low = torch.empty(0)
        self._kernel_args: list[DecodeLora | None] = []
        # Where stacking would waste memory: adapters and their rows, one by one.
        self._is_loop = False
        self._loop: list[tuple[LoraWeights, Tensor]] = []

    def prepare(self, weights: Sequence[LoraWeights | None]) -> None:
        """Prepare for rows with these adapters; None is the base model."""
        if self._is_prepared and tuple(weights) == self._rows:
            return
        self._rows, self._is_prepared = tuple(weights), False
        rows_of: dict[LoraWeights, list[int]] = {}
        for row, adapter in enumerate(weights):
            if adapter is not None:
                rows_of.setdefault(adapter, []).append(row)
        adapters = tuple(rows_of)
        if adapters != self._adapters:
            self._adapters, self._stacks = (), []  # if stacking fails, no stack of other adapters may be left
            self._is_loop = is_wasteful([adapter.spec.rank for adapter in adapters])
            if not self._is_loop:
                self._stacks = [
                    self._stack(adapters, sites, width) for sites, width in zip(self._groups, self._widths, strict=True)
                ]
            self._adapters = adapters
        self._loop = [(adapter, torch.tensor(rows)) for adapter, rows in rows_of.items()] if self._is_loop else []
        if self._kernels is not None:
            self._prepare_kernels(list(rows_of.values()))
        else:
            self._prepare_torch(list(rows_of.values()), len(weights))
        self._is_prepared = True

    def _prepare_kernels(self, rows_of: Sequence[Sequence[int]]) -> None:
        self._order_B = torch.tensor([row for rows in rows_of for row in rows])
        self._starts_G = torch.tensor([0, *accumulate(len(rows) for rows in rows_of)])
        most = max((stack.up_GSO.shape[1] for stack in self._stacks if stack is not None), default=0)
        self._low = torch.empty(len(self._rows) * most)
        self._kernel_args = [None if stack is None else self._args_for(stack) for stack in self._stacks]

    def _args_for(self, stack: LoraStack) -> DecodeLora:
        return DecodeLora(
            low=self._low.data_ptr(),
            down=stack.down.data_ptr(),
            up=stack.up_GSO.data_ptr(),
            order=self._order_B.data_ptr(),
            starts=self._starts_G.data_ptr(),
            columns=stack.columns.data_ptr(),
            adapters=len(self._adapters),
            sites=len(stack.columns),
            rank=stack.rank,
            into=stack.down.shape[2],
            out=stack.up_GSO.shape[2],
        )

    def _prepare_torch(self, rows_of: Sequence[Sequence[int]], count: int) -> None:
        """Order the rows by adapter, each padded to the adapter that has the most."""
        most = max((len(rows) for rows in rows_of), default=0)
        self._shape = (len(rows_of), most)
        order = [row for rows in rows_of for row in (*rows, *[-1] * (most - len(rows)))]
        if order == list(range(count)):
            self._rows_N = self._real_N = None
        else:
            rows_N = torch.tensor(order)
            self._real_N = (rows_N >= 0).nonzero()[:, 0]
            self._rows_N = rows_N.clamp_(min=0)

    def kernel_args(self, group: int) -> DecodeLora | None:
        """Return what makes a product by the kernels add the adapters itself, or None: then call `apply`."""
        return self._kernel_args[group] if self._kernel_args else None

    def apply(self, group: int, x_BD: Tensor, y_BO: Tensor) -> None:
        """Add what the adapters contribute to the output of a group, in place."""
        if self._is_loop:
            for adapter, rows_N in self._loop:
                _apply_adapter(self._groups[group], adapter, rows_N, x_BD, y_BO)
            return
        stack = self._stacks[group] if self._adapters else None
        if stack is None:
            return
        kernel_args = self.kernel_args(group)
        if self._kernels is not None and kernel_args is not None:
            self._kernels.lora_decode(x_BD.contiguous(), y_BO, kernel_args)
            return
        if self._rows_N is None:  # the rows are ordered by adapter already
            shape = self._shape
            low_GMS = torch.bmm(x_BD.view(*shape, -1), stack.down)
            y_BO.view(*shape, -1).baddbmm_(low_GMS, stack.up_GSO)
            return
        assert self._real_N is not None
        x_ND = x_BD.index_select(0, self._rows_N)
        low_GMS = torch.bmm(x_ND.view(*self._shape, -1), stack.down)
        delta_NO = torch.bmm(low_GMS, stack.up_GSO).flatten(0, 1)
        y_BO.index_add_(0, self._rows_N[self._real_N], delta_NO[self._real_N])

    def _stack(self, adapters: Sequence[LoraWeights], sites: Mapping[str, slice], width: int) -> LoraStack | None:
        used = [site for site in sites if any(site in adapter.pairs for adapter in adapters)]
        if not used:
            return None
        rank = max(adapter.spec.rank for adapter in adapters)
        if all(adapter.spec.rank == rank and all(site in adapter.pairs for site in used) for adapter in adapters):
            down_GSD, up_GSO = _stack_down(adapters, used), _stack_up(adapters, used, sites)
        else:
            down_GSD, up_GSO = _stack_padded(adapters, used, sites, rank, width)
        down = down_GSD if self._kernels is not None else down_GSD.transpose(1, 2).contiguous()
        return LoraStack(down, up_GSO, torch.tensor([(sites[site].start, sites[site].stop) for site in used]), rank)


def _stack_down(adapters: Sequence[LoraWeights], used: Sequence[str]) -> Tensor:
    """Return the A of adapters of one rank [G, S, D]."""
    down_ND = torch.cat([adapter.pairs[site][0].detach() for adapter in adapters for site in used])
    return down_ND.view(len(adapters), -1, down_ND.shape[1])


def _stack_up(adapters: Sequence[LoraWeights], used: Sequence[str], sites: Mapping[str, slice]) -> Tensor:
    """Return their s·Bᵀ [G, S, O]. `sites` has all sites of the group."""
    spec = adapters[0].spec
    up_GSO = torch.zeros(len(adapters), len(used) * spec.rank, max(columns.stop for columns in sites.values()))
    for number, site in enumerate(used):
        rows = slice(number * spec.rank, (number + 1) * spec.rank)
        up_GOR = torch.stack([adapter.pairs[site][1].detach() for adapter in adapters])
        torch.mul(up_GOR.transpose(1, 2), spec.scale, out=up_GSO[:, rows, sites[site]])
    return up_GSO


def _stack_padded(
    adapters: Sequence[LoraWeights], used: Sequence[str], sites: Mapping[str, slice], rank: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return A and s·Bᵀ of adapters of different ranks, or on different sites, padded with zeros."""
    down_GSD = torch.zeros(len(adapters), len(used) * rank, width)
    up_GSO = torch.zeros(len(adapters), len(used) * rank, max(columns.stop for columns in sites.values()))
    for number, site in enumerate(used):
        for index, adapter in enumerate(adapters):
            if site in adapter.pairs:
                a_RD, b_OR = adapter.pairs[site]
                rows = slice(number * rank, number * rank + a_RD.shape[0])
                down_GSD[index, rows] = a_RD.detach()
                up_GSO[index, rows, sites[site]] = b_OR.detach().t() * adapter.spec.scale
    return down_GSD, up_GSO


def _apply_adapter(
    sites: Mapping[str, slice], adapter: LoraWeights, rows_N: Tensor, x_BD: Tensor, y_BO: Tensor
) -> None:
    """Add what one adapter contributes to its rows, site by site."""
    for site, columns in sites.items():
        if site in adapter.pairs:
            a_RD, b_OR = adapter.pairs[site]
            low_NR = x_BD[rows_N] @ a_RD.detach().t() * adapter.spec.scale
            y_BO[:, columns].index_add_(0, rows_N, low_NR @ b_OR.detach().t())


def is_wasteful(ranks: Sequence[int]) -> bool:
    """Whether stacks would be mostly zeros, or too large: then adapters are applied one by one."""
    padded = max(ranks, default=0) * len(ranks)
    return padded > MOST_RANKS or padded > max(FEW_RANKS, 2 * sum(ranks))
