"""Quantized weights for decoding (`--decode-weights`): a step is faster, and its numbers are not the model's.

Only the linear layers of a decode step are quantized. Prompts and logits use the model's own weights, so prompt
log-probabilities stay exact, and training never uses these weights. The engine measures and logs how far a format is
off.

bfloat16: products in bfloat16. int8: weights and inputs are scaled row by row, so that what a row samples does not
depend on the rows beside it.

Axes: N rows, D in, O out, T tokens, V vocabulary.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinkex.engine.contract import EngineFault, first_line
from tinkex.engine.packed.kernels.binding import Kernels
from tinkex.engine.packed.linear import Linear, PackedLinear, onednn_linear, onednn_reorder

FORMATS = ("float32", "bfloat16", "int8")


class Bfloat16Linear:
    """A `Linear` with products in bfloat16."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None) -> None:
        self._packed = onednn_reorder(weight_OD.bfloat16())
        self._bias_O = bias_O

    def __call__(self, x_ND: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        y_NO = onednn_linear(x_ND.bfloat16(), self._packed).float()
        return _add(y_NO, self._bias_O, residual_NO)


class Int8Linear:
    """A `Linear` with weights and inputs in int8."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None) -> None:
        scale_O = weight_OD.abs().amax(1).double().clamp_(min=1e-30) / 127
        zero_O = torch.zeros(len(scale_O), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that these calls will move
            quantized = torch.quantize_per_channel(weight_OD.contiguous(), scale_O, zero_O, 0, torch.qint8)
            self._packed: Any = torch.ops.quantized.linear_prepack(quantized, None)
        self._bias_O = bias_O
        # torch quantizes all rows with one range: every row is scaled to ±1, and an extra row pins the range to ±1.
        self._guard_1D = torch.zeros(1, weight_OD.shape[1])
        self._guard_1D[0, :2] = torch.tensor([1.0, -1.0])

    def __call__(self, x_ND: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        largest_N1 = x_ND.abs().amax(1, keepdim=True)
        # A row that is not finite stays so, and changes no other row.
        scaled_ND = torch.nan_to_num(x_ND / largest_N1, 0.0, 0.0, 0.0)
        y_NO = torch.ops.quantized.linear_dynamic(torch.cat([scaled_ND, self._guard_1D]), self._packed, False)
        return _add(y_NO[:-1] * largest_N1, self._bias_O, residual_NO)


def _add(y_NO: Tensor, bias_O: Tensor | None, residual_NO: Tensor | None) -> Tensor:
    if bias_O is not None:
        y_NO += bias_O
    return y_NO if residual_NO is None else y_NO.add_(residual_NO)


def linear_for(kind: str, weight_OD: Tensor, bias_O: Tensor | None, kernels: Kernels | None = None) -> Linear:
    """Return a linear layer for decoding with weights of `kind`, one of `FORMATS`."""
    if kind == "float32":
        return PackedLinear(weight_OD, bias_O, kernels)
    try:
        linear = (Bfloat16Linear if kind == "bfloat16" else Int8Linear)(weight_OD, bias_O)
        linear(torch.zeros(1, weight_OD.shape[1]))  # some machines can reorder such weights and not multiply by them
        return linear
    except Exception as error:  # this torch was built without the format, or the processor lacks it
        raise EngineFault(
            f"--decode-weights {kind}: this processor, or the installed PyTorch, cannot compute with such weights "
            f"({first_line(error, 200)}). Remove the flag.",
            "server",
        ) from error


class Divergence(NamedTuple):
    """How far the next-token distributions of two models are apart along one text."""

    positions: int
    mean_kl: float
    largest_kl: float
    agreeing: int
    """Positions at which both have the same most likely token."""

    def __str__(self) -> str:
        return (
            f"over {self.positions} tokens of its own text the KL divergence from float32 is {self.mean_kl:.1e} on "
            f"average and {self.largest_kl:.1e} at most; the most likely token is the same at {self.agreeing}"
        )


def divergence(own_TV: Tensor, rounded_TV: Tensor) -> Divergence:
    """Compare the logits of the model's own weights with those of quantized ones."""
    own, rounded = own_TV.double().log_softmax(1), rounded_TV.double().log_softmax(1)
    kl_T = (own.exp() * (own - rounded)).sum(1)
    agreeing = (own.argmax(1) == rounded.argmax(1)).sum()
    return Divergence(len(kl_T), float(kl_T.mean()), float(kl_T.max()), int(agreeing))
