"""What adapters add to a layer, and how their gradients come back, for tokens that stand end to end.

One adapter alone on many tokens is merged into the weight of the layer at hand: its forward part is then free, and
what flows back goes through the merged weight. Several adapters, or few tokens, take the low-rank way beside the base
product; tokens are sorted by adapter. The thin products are the kernels' where there are such, else torch's.

Per site: y += s·U·Bᵀ with U = x·Aᵀ; backward dU = s·dy·B, dA += dUᵀ·x, dB += s·dyᵀ·U, dx += dU·A.

Axes: N tokens, T those of one adapter, R rank, D in, O out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights, Segment
from tinkex.engine.packed import linear
from tinkex.engine.packed.kernels.binding import Act, Acts, Kernels
from tinkex.engine.packed.quantized import Linear
from tinkex.engine.packed.weights import Group

MERGE_FROM = 384
"""Tokens from which merging pays: it reads and writes every weight once, whatever their number."""
THIN = 128
"""Ranks up to which the kernels are used: they are three times as fast as torch at 8, and equal here."""


class Part(NamedTuple):
    """One site of one adapter inside a group: its rows of the fused weight, and its numbers."""

    place: slice
    a_RD: Tensor
    b_OR: Tensor


def parts_of(weights: LoraWeights, group: Group) -> list[Part]:
    return [Part(place, *weights.pairs[site]) for site, place in group.places.items() if site in weights.pairs]


class Deltas:
    """The adapters of one pack: tokens of no segment are the base model's, the first `graded` take part backward."""

    def __init__(
        self, segments: Sequence[Segment], count: int, graded: int = 0, *, found: Kernels | None = None
    ) -> None:
        """`count`: tokens in all."""
        # Each by its own rank: what others bring must not change an adapter's bits.
        widest = 0 if found is None else THIN
        thin = [one for one in segments if one.weights.spec.rank <= widest]
        wide = [one for one in segments if one.weights.spec.rank > widest]
        self._kernels, self._thin, self._wide = found, thin, wide
        self._graded_thin, self._graded_wide = ([one for one in some if one.stop <= graded] for some in (thin, wide))
        self._alone: LoraWeights | None = None
        if len(segments) == 1 and segments[0].start == 0 and segments[0].stop == count >= MERGE_FROM:
            self._alone = segments[0].weights

    def forward(self, group: Group, x_ND: Tensor, packed: Linear | None = None) -> Tensor:
        """The layer's output, adapters included. `packed`: its weight once more, where it is laid out for few rows."""
        if self._alone is not None:
            return linear.linear(x_ND, self._merged(self._alone, group), group.bias_O)
        y_NO = linear.linear(x_ND, group.weight_OD, group.bias_O) if packed is None else packed(x_ND)
        job = Job(group, self._thin, x_ND) if self._thin else None
        if job is not None and job.count:
            assert self._kernels is not None
            job.acts.y, job.acts.out = y_NO.data_ptr(), y_NO.shape[1]
            self._kernels.deltas_forward(job.acts)
        for weights, start, stop in self._wide:
            parts = parts_of(weights, group)
            if parts:
                low_TR = _down(x_ND[start:stop], parts) * weights.spec.scale
                _up(y_NO[start:stop], low_TR, parts)
        return y_NO

    def backward(self, group: Group, x_ND: Tensor, dy_NO: Tensor, *, needs_dx: bool = True) -> Tensor:
        """Adds to the adapters' gradients; returns dx (empty if nobody needs it)."""
        weight_OD = group.weight_OD if self._alone is None else self._merged(self._alone, group)
        dx_ND = linear.backward(dy_NO, weight_OD) if needs_dx else x_ND[:0]
        adds_dx = needs_dx and self._alone is None  # a merged weight has handed it back already
        job = Job(group, self._graded_thin, x_ND) if self._graded_thin else None
        if job is not None and job.count:
            assert self._kernels is not None and job.has_gradients
            job.acts.dy, job.acts.out = dy_NO.data_ptr(), dy_NO.shape[1]
            job.acts.y = dx_ND.data_ptr() if adds_dx else None
            self._kernels.deltas_backward(job.acts)
        for weights, start, stop in self._graded_wide:
            parts = parts_of(weights, group)
            if parts:
                low_TR, a_RD = _gradients(weights, parts, x_ND[start:stop], dy_NO[start:stop])
                if adds_dx:
                    dx_ND[start:stop].addmm_(low_TR, a_RD)
        return dx_ND

    @staticmethod
    def _merged(weights: LoraWeights, group: Group) -> Tensor:
        parts = parts_of(weights, group)
        if not parts:
            return group.weight_OD
        merged_OD = group.weight_OD.clone()
        for part in parts:
            merged_OD[part.place].addmm_(part.b_OR, part.a_RD, alpha=weights.spec.scale)
        return merged_OD


class Job:
    """What the kernels are told of some adapters and a group; holds the memory that they use."""

    def __init__(self, group: Group, segments: Sequence[Segment], x_ND: Tensor) -> None:
        table: list[Act] = []
        ranks = turned = 0
        for weights, start, stop in segments:
            rank, low = weights.spec.rank, 0
            for place, a_RD, b_OR in parts_of(weights, group):
                columns = place.stop - place.start
                pointers = [None if one is None else one.data_ptr() for one in (a_RD, b_OR, a_RD.grad, b_OR.grad)]
                table.append(Act(*pointers, start, stop, place.start, columns, rank, low, turned, weights.spec.scale))
                low += rank
                turned += rank * columns
            ranks = max(ranks, low)
        self.count = len(table)
        self.has_gradients = all(act.da and act.db for act in table)
        self._table = (Act * self.count)(*table)
        rows, width = x_ND.shape
        self._low_2NR, self._turned = torch.empty(2, rows, ranks), torch.empty(turned)
        self.acts = Acts(
            x=x_ND.data_ptr(),
            low=self._low_2NR[0].data_ptr(),
            back=self._low_2NR[1].data_ptr(),
            turned=self._turned.data_ptr(),
            acts=ctypes.addressof(self._table),
            count=self.count,
            rows=rows,
            width=width,
            ranks=ranks,
        )


def _down(x_TD: Tensor, parts: Sequence[Part]) -> Tensor:
    """x·Aᵀ of all sites side by side [T, R of all]."""
    a_RD = parts[0].a_RD if len(parts) == 1 else torch.cat([part.a_RD for part in parts])
    return x_TD @ a_RD.t()


def _up(y_TO: Tensor, low_TR: Tensor, parts: Sequence[Part]) -> None:
    rank = parts[0].a_RD.shape[0]
    for number, part in enumerate(parts):
        y_TO[:, part.place].addmm_(low_TR[:, number * rank : (number + 1) * rank], part.b_OR.t())


def _gradients(weights: LoraWeights, parts: Sequence[Part], x_TD: Tensor, dy_TO: Tensor) -> tuple[Tensor, Tensor]:
    """Adds dA and dB; returns dU and A of all sites, whose product is what flows back."""
    scale, rank = weights.spec.scale, parts[0].a_RD.shape[0]
    a_RD = parts[0].a_RD if len(parts) == 1 else torch.cat([part.a_RD for part in parts])
    low_TR = x_TD @ a_RD.t()
    back_TR = torch.empty_like(low_TR)
    for number, part in enumerate(parts):
        place = slice(number * rank, (number + 1) * rank)
        dy_TP = dy_TO[:, part.place]
        torch.mm(dy_TP, part.b_OR, out=back_TR[:, place])
        # Transposed: the long side of the product stays the contiguous one.
        assert part.b_OR.grad is not None
        part.b_OR.grad.t().add_(low_TR[:, place].t() @ dy_TP, alpha=scale)
    back_TR *= scale
    grad_a_RD = back_TR.t() @ x_TD
    for number, part in enumerate(parts):
        assert part.a_RD.grad is not None
        part.a_RD.grad.add_(grad_a_RD[number * rank : (number + 1) * rank])
    return back_TR, a_RD
