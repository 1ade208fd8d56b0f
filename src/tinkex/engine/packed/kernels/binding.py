"""The shipped kernels (`kernels_*.c`), where they can be used: x86-64 Linux with AVX2 or AVX-512.

They run on the threads of the OpenMP that torch has loaded: a second pool would fight the first for the cores. Which
variant runs is decided by the processor alone, so a restart gives the same bits.

Axes: B or N rows, D in, O out, H query heads, K key heads, W width of a head, T columns of a cache, F width of the MLP.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import sys
from ctypes import POINTER, byref, c_float, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("tinkex.engine")

LIBRARY = Path(__file__).parent / "kernels_x86_64_linux.lib"
VARIANTS = ("avx512", "avx2")
POINTERS = ("qkv", "cosine", "sine", "keys", "values", "held", "gathered", "most", "total")


class Attention(ctypes.Structure):
    """`struct attention` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in POINTERS),
        *((name, c_long) for name in ("rows", "heads", "key_heads", "width", "columns", "column")),
        ("scale", c_float),
    )


class Adapters(ctypes.Structure):
    """`struct adapters` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "low", "down", "up", "order", "starts", "columns")),
        *((name, c_long) for name in ("adapters", "sites", "rank", "width", "out")),
    )


class Act(ctypes.Structure):
    """`struct act` of the source: one site of one adapter on some rows."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "b", "da", "db")),
        *((name, c_long) for name in ("start", "stop", "first", "columns", "rank", "low", "turned")),
        ("scale", c_float),
    )


class Acts(ctypes.Structure):
    """`struct deltas` of the source: what all adapters of a pass do to one group of layers."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "dy", "y", "low", "back", "turned", "acts")),
        *((name, c_long) for name in ("count", "rows", "width", "out", "ranks")),
    )


class Kernels:
    """One variant of the library. Tensors are float32 and contiguous: who calls sees to that."""

    def __init__(self, library: ctypes.CDLL, openmp: ctypes.CDLL, variant: str) -> None:
        self.variant = variant
        self.panel, self.lanes, self._widest = (
            ctypes.c_int.in_dll(library, f"{name}_{variant}").value for name in ("panel", "lanes", "widest")
        )

        def found(name: str, *kinds: Any) -> Any:
            function = getattr(library, f"{name}_{variant}")
            function.argtypes, function.restype = kinds, None
            return function

        threads = [ctypes.cast(getattr(openmp, name), c_void_p) for name in OPENMP]
        found("use_threads", c_void_p, c_void_p, c_void_p)(*threads)
        self._linear = found("linear", *[c_void_p] * 5, *[c_long] * 3, POINTER(Adapters), c_long)
        self._norm = found("norm", *[c_void_p] * 2, c_float, c_void_p, *[c_long] * 3)
        self._norm_back = found("norm_back", *[c_void_p] * 2, c_float, *[c_void_p] * 3, *[c_long] * 3)
        self._turn = found("turn", *[c_void_p] * 3, c_float, *[c_long] * 5)
        self._gate = found("gate", *[c_void_p] * 2, *[c_long] * 3)
        self._gate_back = found("gate_back", *[c_void_p] * 3, *[c_long] * 3)
        self._attend = found("attend", POINTER(Attention), c_long)
        self._adapt = found("adapt", POINTER(Adapters), c_long)
        self._deltas_forward = found("deltas_forward", POINTER(Acts), c_long)
        self._deltas_backward = found("deltas_backward", POINTER(Acts), c_long)

    def in_panels(self, weight_OD: Tensor) -> Tensor:
        """A weight as `linear` reads it [panels, D, panel]."""
        (out, width), panel = weight_OD.shape, self.panel
        panels = torch.zeros(-(-out // panel), width, panel)
        whole = out // panel
        panels[:whole] = weight_OD[: whole * panel].view(-1, panel, width).transpose(1, 2)
        if whole < len(panels):
            panels[whole, :, : out - whole * panel] = weight_OD[whole * panel :].t()
        return panels

    def linear(
        self,
        x_BD: Tensor,
        panels: Tensor,
        out: int,
        bias_O: Tensor | None = None,
        onto_BO: Tensor | None = None,
        adapters: Adapters | None = None,
    ) -> Tensor:
        """x·Wᵀ + b, what it is to be added to, and the adapters' part."""
        rows, width = x_BD.shape
        y_BO = torch.empty(rows, out)
        x, y = x_BD.data_ptr(), y_BO.data_ptr()
        bias, onto = None if bias_O is None else bias_O.data_ptr(), None if onto_BO is None else onto_BO.data_ptr()
        if adapters is not None:
            adapters.x, adapters.y = x, y
        acting = None if adapters is None else byref(adapters)
        self._linear(x, panels.data_ptr(), bias, onto, y, rows, out, width, acting, torch.get_num_threads())
        return y_BO

    def norm(self, x_ND: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        y_ND = torch.empty_like(x_ND)
        self._norm(x_ND.data_ptr(), gain_D.data_ptr(), eps, y_ND.data_ptr(), *x_ND.shape, _threads(x_ND))
        return y_ND

    def norm_backward(self, x_ND: Tensor, gain_D: Tensor, eps: float, dy_ND: Tensor, onto_ND: Tensor | None) -> Tensor:
        """In place of `dy_ND`."""
        dy, onto = dy_ND.data_ptr(), None if onto_ND is None else onto_ND.data_ptr()
        self._norm_back(x_ND.data_ptr(), gain_D.data_ptr(), eps, dy, onto, dy, *x_ND.shape, _threads(x_ND))
        return dy_ND

    def rotate(
        self, qkv_NO: Tensor, cos_N1W: Tensor, sin_N1W: Tensor, heads: int, width: int, *, is_back: bool
    ) -> None:
        rows, stride = qkv_NO.shape
        assert cos_N1W.shape == sin_N1W.shape == (rows, 1, width // 2)  # a kernel would read past their end
        given = qkv_NO.data_ptr(), cos_N1W.data_ptr(), sin_N1W.data_ptr(), -1.0 if is_back else 1.0
        self._turn(*given, rows, heads, width, stride, _threads(qkv_NO))

    def gate(self, gate_up_NF: Tensor) -> Tensor:
        """silu(gate)·up."""
        rows, width = gate_up_NF.shape[0], gate_up_NF.shape[1] // 2
        y_NF = torch.empty(rows, width)
        self._gate(gate_up_NF.data_ptr(), y_NF.data_ptr(), rows, width, _threads(gate_up_NF))
        return y_NF

    def gate_backward(self, gate_up_NF: Tensor, dy_NF: Tensor) -> Tensor:
        dgate_up_NF = torch.empty_like(gate_up_NF)
        given = gate_up_NF.data_ptr(), dy_NF.data_ptr(), dgate_up_NF.data_ptr()
        self._gate_back(*given, *dy_NF.shape, _threads(gate_up_NF))
        return dgate_up_NF

    def deltas_forward(self, job: Acts) -> None:
        self._deltas_forward(byref(job), torch.get_num_threads())

    def deltas_backward(self, job: Acts) -> None:
        self._deltas_backward(byref(job), torch.get_num_threads())

    def takes_heads(self, width: int) -> bool:
        return width % self.lanes == 0 and width <= self._widest

    def takes_gates(self, width: int) -> bool:
        return width % self.lanes == 0

    def attend(self, job: Attention) -> None:
        self._attend(byref(job), torch.get_num_threads())

    def adapt(self, x_BD: Tensor, y_BO: Tensor, adapters: Adapters) -> None:
        """Add the adapters' part alone."""
        adapters.x, adapters.y = x_BD.data_ptr(), y_BO.data_ptr()
        self._adapt(byref(adapters), torch.get_num_threads())


ALONE = 1 << 15
"""Numbers up to which one thread has done its work before others are awake."""


def _threads(x: Tensor) -> int:
    return 1 if x.numel() <= ALONE else torch.get_num_threads()


OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@functools.cache
def find(variant: str = "auto") -> Kernels | None:
    """The kernels for this machine, or None: then torch does their work."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    able = {"AVX512": VARIANTS, "AVX2": VARIANTS[1:]}.get(torch.backends.cpu.get_cpu_capability(), ())
    chosen = [name for name in able if variant in ("auto", name)]
    if not chosen:
        return None
    try:
        return Kernels(ctypes.CDLL(str(LIBRARY)), _openmp(), chosen[0])
    except (OSError, AttributeError, ValueError) as problem:
        logger.warning("The shipped kernels cannot be used (%s): all is slower without them.", problem)
        return None


def _openmp() -> ctypes.CDLL:
    """Where torch's own calls of OpenMP go. Others may have loaded another one, whose threads would fight with its."""
    for place in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        library = ctypes.CDLL(place)
        if all(hasattr(library, name) for name in OPENMP):
            return library
    raise OSError("torch has loaded no OpenMP that is known")
