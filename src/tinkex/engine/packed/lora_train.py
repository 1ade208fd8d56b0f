"""LoRA over packed tokens, forward and backward: what adapters add to a layer, and their gradients.

Per site, for the T tokens of one adapter: y += s·U·Bᵀ with U = x·Aᵀ [T, R]. Backward: dU = s·dy·B, dA += dUᵀ·x,
dB += s·dyᵀ·U, dx += dU·A. Only A and B have gradients; the base weight is frozen.

A single adapter on many tokens is merged into the weight, W + s·B·A, layer by layer: its forward part then costs
nothing, and dx goes through the merged weight. Several adapters, or few tokens, are computed beside the base product.
The thin products go to the C kernels where there are such, else to torch. An adapter's numbers do not depend on which
other adapters are in the pack: each is assigned to kernels or torch by its own rank.

Axes: N tokens, T tokens of one adapter, R rank, D in, O out, P columns of one site.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights, Segment
from tinkex.engine.packed import linear
from tinkex.engine.packed.kernels.binding import Kernels, LoraBatch, LoraSite
from tinkex.engine.packed.linear import Linear
from tinkex.engine.packed.weights import Group

MERGE_FROM = 384
"""Tokens from which merging pays: it reads and writes every weight once, whatever their number."""
THIN = 128
"""Ranks up to which the kernels are used: they are three times as fast as torch at rank 8, and equally fast here."""


class LoraSlice(NamedTuple):
    """One site of one adapter: its columns of the group's output, and its pair of matrices."""

    columns: slice
    a_RD: Tensor
    b_PR: Tensor


def slices_of(weights: LoraWeights, group: Group) -> list[LoraSlice]:
    """Return the sites of a group that an adapter trains."""
    return [LoraSlice(columns, *weights.pairs[site]) for site, columns in group.slices.items() if site in weights.pairs]


class PackedLora:
    """The adapters of one pack. Tokens of no segment use the base model; the first `graded` tokens have a gradient."""

    def __init__(
        self, segments: Sequence[Segment], count: int, graded: int = 0, *, kernels: Kernels | None = None
    ) -> None:
        """`count`: tokens in all."""
        # By each adapter's own rank: the other adapters of the pack must not change its bits.
        widest = 0 if kernels is None else THIN
        thin = [segment for segment in segments if segment.weights.spec.rank <= widest]
        wide = [segment for segment in segments if segment.weights.spec.rank > widest]
        self._kernels, self._thin, self._wide = kernels, thin, wide
        self._graded_thin = [segment for segment in thin if segment.stop <= graded]
        self._graded_wide = [segment for segment in wide if segment.stop <= graded]
        self._merged_adapter: LoraWeights | None = None
        if len(segments) == 1 and segments[0].start == 0 and segments[0].stop == count >= MERGE_FROM:
            self._merged_adapter = segments[0].weights

    def forward(self, group: Group, x_ND: Tensor, packed: Linear | None = None) -> Tensor:
        """Return the group's output, adapters included. `packed`: the same weight, stored for products of few rows."""
        if self._merged_adapter is not None:
            return linear.linear(x_ND, _merge(self._merged_adapter, group), group.bias_O)
        y_NO = linear.linear(x_ND, group.weight_OD, group.bias_O) if packed is None else packed(x_ND)
        call = LoraCall(group, self._thin, x_ND) if self._thin else None
        if call is not None and call.count:
            assert self._kernels is not None
            call.batch.y, call.batch.out = y_NO.data_ptr(), y_NO.shape[1]
            self._kernels.lora_forward(call.batch)
        for weights, start, stop in self._wide:
            slices = slices_of(weights, group)
            if slices:
                low_TR = _down(x_ND[start:stop], slices) * weights.spec.scale
                _up(y_NO[start:stop], low_TR, slices)
        return y_NO

    def backward(self, group: Group, x_ND: Tensor, dy_NO: Tensor, *, needs_dx: bool = True) -> Tensor:
        """Add to the adapters' gradients and return dx, or an empty tensor if it is not needed."""
        merged = self._merged_adapter
        weight_OD = group.weight_OD if merged is None else _merge(merged, group)
        dx_ND = linear.linear_backward(dy_NO, weight_OD) if needs_dx else x_ND[:0]
        adds_dx = needs_dx and merged is None  # with a merged weight, dx has the adapter's part already
        call = LoraCall(group, self._graded_thin, x_ND) if self._graded_thin else None
        if call is not None and call.count:
            assert self._kernels is not None and call.has_gradients
            call.batch.dy, call.batch.out = dy_NO.data_ptr(), dy_NO.shape[1]
            call.batch.y = dx_ND.data_ptr() if adds_dx else None
            self._kernels.lora_backward(call.batch)
        for weights, start, stop in self._graded_wide:
            slices = slices_of(weights, group)
            if slices:
                dlow_TR, a_RD = _add_gradients(weights, slices, x_ND[start:stop], dy_NO[start:stop])
                if adds_dx:
                    dx_ND[start:stop].addmm_(dlow_TR, a_RD)
        return dx_ND


def _merge(weights: LoraWeights, group: Group) -> Tensor:
    """Return W + s·B·A, a copy, or the weight itself if the adapter has no site here."""
    slices = slices_of(weights, group)
    if not slices:
        return group.weight_OD
    merged_OD = group.weight_OD.clone()
    for part in slices:
        merged_OD[part.columns].addmm_(part.b_PR, part.a_RD, alpha=weights.spec.scale)
    return merged_OD


class LoraCall:
    """The arguments of one call of the kernels, for some adapters on one group; owns the memory that the call uses."""

    def __init__(self, group: Group, segments: Sequence[Segment], x_ND: Tensor) -> None:
        sites: list[LoraSite] = []
        ranks = offset = 0
        for weights, start, stop in segments:
            # The sites of one adapter have their ranks side by side in a row of `low`; B goes transposed to `offset`.
            rank, low = weights.spec.rank, 0
            for columns, a_RD, b_PR in slices_of(weights, group):
                width = columns.stop - columns.start
                tensors = (a_RD, b_PR, a_RD.grad, b_PR.grad)
                pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
                numbers = start, stop, columns.start, width, rank, low, offset
                sites.append(LoraSite(*pointers, *numbers, weights.spec.scale))
                low += rank
                offset += rank * width
            ranks = max(ranks, low)
        self.count = len(sites)
        self.has_gradients = all(site.da and site.db for site in sites)
        self._sites = (LoraSite * self.count)(*sites)
        rows, width = x_ND.shape
        self._low_2NR, self._b_t = torch.empty(2, rows, ranks), torch.empty(offset)
        self.batch = LoraBatch(
            x=x_ND.data_ptr(),
            low=self._low_2NR[0].data_ptr(),
            dlow=self._low_2NR[1].data_ptr(),
            b_t=self._b_t.data_ptr(),
            sites=ctypes.addressof(self._sites),
            count=self.count,
            rows=rows,
            into=width,
            ranks=ranks,
        )


def _down(x_TD: Tensor, slices: Sequence[LoraSlice]) -> Tensor:
    """Return x·Aᵀ of all sites side by side [T, R of all]."""
    a_RD = slices[0].a_RD if len(slices) == 1 else torch.cat([part.a_RD for part in slices])
    return x_TD @ a_RD.t()


def _up(y_TO: Tensor, low_TR: Tensor, slices: Sequence[LoraSlice]) -> None:
    """Add U·Bᵀ of every site to its columns."""
    rank = slices[0].a_RD.shape[0]
    for number, part in enumerate(slices):
        y_TO[:, part.columns].addmm_(low_TR[:, number * rank : (number + 1) * rank], part.b_PR.t())


def _add_gradients(
    weights: LoraWeights, slices: Sequence[LoraSlice], x_TD: Tensor, dy_TO: Tensor
) -> tuple[Tensor, Tensor]:
    """Add dA and dB of every site; return dU and A of all sites [T, R of all], [R of all, D], whose product is dx."""
    scale, rank = weights.spec.scale, slices[0].a_RD.shape[0]
    a_RD = slices[0].a_RD if len(slices) == 1 else torch.cat([part.a_RD for part in slices])
    low_TR = x_TD @ a_RD.t()
    dlow_TR = torch.empty_like(low_TR)
    for number, part in enumerate(slices):
        ranks = slice(number * rank, (number + 1) * rank)
        dy_TP = dy_TO[:, part.columns]
        torch.mm(dy_TP, part.b_PR, out=dlow_TR[:, ranks])
        # Transposed: the long side of the product stays the contiguous one.
        assert part.b_PR.grad is not None
        part.b_PR.grad.t().add_(low_TR[:, ranks].t() @ dy_TP, alpha=scale)
    dlow_TR *= scale
    grad_a_RD = dlow_TR.t() @ x_TD
    for number, part in enumerate(slices):
        assert part.a_RD.grad is not None
        part.a_RD.grad.add_(grad_a_RD[number * rank : (number + 1) * rank])
    return dlow_TR, a_RD
