"""Weights of fewer bits for decoding, if the user asks for them: a step is faster, and its numbers are not the model's.

Only the linear layers of a step are rounded. Prompts are read and logits are made with the model's own weights, so that
prompt log-probabilities stay exact, and training never sees any of this. How far a format is off is measured when it is
chosen, and said.

bfloat16: products in bfloat16. int8: weights and inputs each by row, so that what a row draws does not depend on its
neighbours.

Axes: N rows, D in, O out, T tokens, V vocabulary.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tinkex.engine.contract import EngineFault
from tinkex.engine.packed import linear as gemm
from tinkex.engine.packed.kernels.binding import Kernels
from tinkex.engine.packed.linear import Packed

FORMATS = ("float32", "bfloat16", "int8")


class Linear(Protocol):
    def __call__(self, x_ND: Tensor, onto_NO: Tensor | None = None) -> Tensor:
        """x·Wᵀ + b, and what it is to be added to."""


class Bfloat16:
    """Implements `Linear`."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None) -> None:
        self._packed = gemm.laid_out(weight_OD.bfloat16())
        self._bias_O = bias_O

    def __call__(self, x_ND: Tensor, onto_NO: Tensor | None = None) -> Tensor:
        found_NO = gemm.pointwise(x_ND.bfloat16(), self._packed).float()
        return _added(found_NO, self._bias_O, onto_NO)


class Int8:
    """Implements `Linear`."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None) -> None:
        scale_O = weight_OD.abs().amax(1).double().clamp_(min=1e-30) / 127
        zero_O = torch.zeros(len(scale_O), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch is moving these calls elsewhere
            quantized = torch.quantize_per_channel(weight_OD.contiguous(), scale_O, zero_O, 0, torch.qint8)
            self._packed: Any = torch.ops.quantized.linear_prepack(quantized, None)
        self._bias_O = bias_O
        # torch takes one range for all rows: every row is brought to ±1, and one more holds the range there.
        self._guard_1D = torch.zeros(1, weight_OD.shape[1])
        self._guard_1D[0, :2] = torch.tensor([1.0, -1.0])

    def __call__(self, x_ND: Tensor, onto_NO: Tensor | None = None) -> Tensor:
        largest_N1 = x_ND.abs().amax(1, keepdim=True)
        # A row that is not finite stays so, alone.
        scaled_ND = torch.nan_to_num(x_ND / largest_N1, 0.0, 0.0, 0.0)
        found_NO = torch.ops.quantized.linear_dynamic(torch.cat([scaled_ND, self._guard_1D]), self._packed, False)
        return _added(found_NO[:-1] * largest_N1, self._bias_O, onto_NO)


def _added(found_NO: Tensor, bias_O: Tensor | None, onto_NO: Tensor | None) -> Tensor:
    if bias_O is not None:
        found_NO += bias_O
    return found_NO if onto_NO is None else found_NO.add_(onto_NO)


def linear_for(kind: str, weight_OD: Tensor, bias_O: Tensor | None, found: Kernels | None = None) -> Linear:
    if kind == "float32":
        return Packed(weight_OD, bias_O, found)
    try:
        linear = (Bfloat16 if kind == "bfloat16" else Int8)(weight_OD, bias_O)
        linear(torch.zeros(1, weight_OD.shape[1]))  # some can lay weights out that they cannot compute with
        return linear
    except Exception as error:  # torch was built without, or the processor cannot
        raise EngineFault(
            f"--decode-weights {kind}: this processor, or the installed PyTorch, cannot compute with such weights "
            f"({str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__}). "
            "Leave the flag away.",
            "server",
        ) from error


class Divergence(NamedTuple):
    """Of two models' next tokens along one text."""

    positions: int
    mean_kl: float
    largest_kl: float
    agreeing: int
    """Positions at which both find the same token the most likely."""

    def __str__(self) -> str:
        return (
            f"over {self.positions} tokens of its own text the KL divergence from float32 is {self.mean_kl:.1e} on "
            f"average and {self.largest_kl:.1e} at most; the most likely token is the same at {self.agreeing}"
        )


def divergence(own_TV: Tensor, rounded_TV: Tensor) -> Divergence:
    own, rounded = own_TV.double().log_softmax(1), rounded_TV.double().log_softmax(1)
    kl_T = (own.exp() * (own - rounded)).sum(1)
    agreeing = (own.argmax(1) == rounded.argmax(1)).sum()
    return Divergence(len(kl_T), float(kl_T.mean()), float(kl_T.max()), int(agreeing))
