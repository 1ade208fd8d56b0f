"""Matrix products, by the library that is fastest on this processor. Which one is decided once, by its maker's name:
a choice by stopwatch could differ after a restart, and with it the last bits of a run that is replayed.

Measured in float32 on two cores: an AMD EPYC gives 180 GFLOP/s through MKL (torch's own way) and 214 through oneDNN; on
an Intel Xeon MKL was the faster one. A handful of rows goes to the shipped kernels where there are such, else to oneDNN
on packed weights.

Axes: N rows, D in, O out.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.packed.kernels.binding import Adapters, Kernels


@functools.cache
def has_onednn() -> bool:
    """Whether products go to oneDNN: on AMD's processors, if torch was built with it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def linear(x_ND: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b. The weight may be a transposed view."""
    if has_onednn() and x_ND.shape[0] > 0:
        return pointwise(x_ND, weight_OD, bias_O)
    return torch.nn.functional.linear(x_ND, weight_OD, bias_O)


def backward(dy_NO: Tensor, weight_OD: Tensor) -> Tensor:
    """dy·W: what a layer hands back to its input."""
    return linear(dy_NO, weight_OD.t())


@functools.cache
def _op(overload: str) -> Any:
    """Looked up when it is first needed: a torch without oneDNN, as on a Mac, has none."""
    return getattr(torch.ops.mkldnn._linear_pointwise, overload)


def laid_out(weight_OD: Tensor) -> Tensor:
    """In oneDNN's own order, for a handful of rows."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OD.contiguous(), PACKED_ROWS)
    return found


def pointwise(x_ND: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b by oneDNN."""
    found: Tensor = _op("default")(x_ND, weight_OD, bias_O, "none", [], "")
    return found


class Packed:
    """A weight laid out for a handful of rows, as decoding has them. A second copy: it costs its own size."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None, found: Kernels | None = None) -> None:
        self._plain_OD, self._bias_O, self._kernels = weight_OD, bias_O, found
        self._laid_out: Any = None
        if self._kernels is not None:
            self._laid_out = self._kernels.in_panels(weight_OD)
        elif has_onednn():
            self._laid_out = laid_out(weight_OD)

    def __call__(self, x_ND: Tensor, onto_NO: Tensor | None = None, adapters: Adapters | None = None) -> Tensor:
        """x·Wᵀ + b, what it is to be added to, and the adapters' part where kernels do it."""
        if self._kernels is not None:
            out = self._plain_OD.shape[0]
            return self._kernels.linear(x_ND.contiguous(), self._laid_out, out, self._bias_O, onto_NO, adapters)
        assert adapters is None
        found: Tensor
        if self._laid_out is None:
            found = torch.nn.functional.linear(x_ND, self._plain_OD, self._bias_O)
            return found if onto_NO is None else found.add_(onto_NO)
        if onto_NO is None:
            return pointwise(x_ND, self._laid_out, self._bias_O)
        found = _op("binary")(x_ND, onto_NO, self._laid_out, self._bias_O, "add")
        return found


PACKED_ROWS = 8
"""What the layout is made for. Other numbers of rows use it as it is: measured from 1 to 512."""
PACKED_UP_TO = 64
"""Rows of the unembedding for which they are used: a prompt that is scored has more, and its adapter should not take
the place of the stepping rows' in their stack."""
