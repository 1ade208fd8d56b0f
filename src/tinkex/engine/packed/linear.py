"""Matrix products, by the library that is fastest on this processor.

The processor's maker decides, once: a choice by stopwatch could differ after a restart, and with it the last bits of a
run that is replayed. Measured in float32 on two cores: an AMD EPYC gives 180 GFLOP/s through MKL (torch's default) and
214 through oneDNN; on an Intel Xeon MKL was faster. Products of a few rows, as decoding has them, go to the C kernels
where there are such, else to oneDNN with reordered weights.

Axes: N rows, D in, O out.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tinkex.engine.packed.kernels.binding import DecodeLora, Kernels


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
    """Return x·Wᵀ + b. The weight may be a transposed view."""
    if has_onednn() and x_ND.shape[0] > 0:
        return onednn_linear(x_ND, weight_OD, bias_O)
    return torch.nn.functional.linear(x_ND, weight_OD, bias_O)


def linear_backward(dy_NO: Tensor, weight_OD: Tensor) -> Tensor:
    """Return dy·W, the gradient of a product's input."""
    return linear(dy_NO, weight_OD.t())


@functools.cache
def _onednn_op(overload: str) -> Any:
    """Looked up on first use: a torch without oneDNN, as on a Mac, has no such attribute."""
    return getattr(torch.ops.mkldnn._linear_pointwise, overload)


def onednn_reorder(weight_OD: Tensor) -> Tensor:
    """Return a copy of a weight in oneDNN's own order, for products of a few rows."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OD.contiguous(), REORDERED_FOR_ROWS)
    return reordered


def onednn_linear(x_ND: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b, computed by oneDNN."""
    y_NO: Tensor = _onednn_op("default")(x_ND, weight_OD, bias_O, "none", [], "")
    return y_NO


class Linear(Protocol):
    """A linear layer of a decode step."""

    def __call__(self, x_ND: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        """Return x·Wᵀ + b + residual."""


class PackedLinear:
    """A `Linear` whose weight is stored in the order that is fastest for a few rows: a second copy of the weight."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None, kernels: Kernels | None = None) -> None:
        self._weight_OD, self._bias_O, self._kernels = weight_OD, bias_O, kernels
        self._reordered: Tensor | None = None
        if self._kernels is not None:
            self._reordered = self._kernels.in_panels(weight_OD)
        elif has_onednn():
            self._reordered = onednn_reorder(weight_OD)

    def __call__(self, x_ND: Tensor, residual_NO: Tensor | None = None, lora: DecodeLora | None = None) -> Tensor:
        """Return x·Wᵀ + b + residual, and with kernels what the adapters of `lora` add."""
        if self._kernels is not None:
            assert self._reordered is not None
            out = self._weight_OD.shape[0]
            return self._kernels.linear(x_ND.contiguous(), self._reordered, out, self._bias_O, residual_NO, lora)
        assert lora is None
        y_NO: Tensor
        if self._reordered is None:
            y_NO = torch.nn.functional.linear(x_ND, self._weight_OD, self._bias_O)
            return y_NO if residual_NO is None else y_NO.add_(residual_NO)
        if residual_NO is None:
            return onednn_linear(x_ND, self._reordered, self._bias_O)
        y_NO = _onednn_op("binary")(x_ND, residual_NO, self._reordered, self._bias_O, "add")
        return y_NO


REORDERED_FOR_ROWS = 8
"""Rows for which oneDNN orders a weight. Other numbers of rows use that order as it is: measured from 1 to 512."""
PACKED_UP_TO = 64
"""Rows up to which the unembedding uses its packed weight. A prompt that is scored has more rows, and must not replace
the adapters of the decoding rows in their stack."""
