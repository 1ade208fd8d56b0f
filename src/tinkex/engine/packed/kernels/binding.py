"""Binds the C kernels of this folder to torch's tensors, where they were built and the processor has the registers.

They run on the threads of the OpenMP that torch has loaded: a second pool would compete with it for the cores. The
processor alone decides which variant runs, so a restart gives the same bits.

Axes: B or N rows, D in, O out, W width of a head, F width of the MLP.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import POINTER, byref, c_float, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.packed.kernels import build

logger = logging.getLogger("tinkex.engine")

OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""GCC's names. LLVM's libomp, which torch brings along on a Mac, has them too."""


class Attention(ctypes.Structure):
    """`struct attention` of decode.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "cosine", "sine", "keys", "values", "lengths")),
        *((name, c_void_p) for name in ("out", "largest", "sum_exp")),
        *((name, c_long) for name in ("rows", "heads", "key_heads", "width", "columns", "column")),
        ("scale", c_float),
    )


class DecodeLora(ctypes.Structure):
    """`struct decode_lora` of decode.c: the adapters of a decode step, on one group of layers."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "low", "down", "up", "order", "starts", "columns")),
        *((name, c_long) for name in ("adapters", "sites", "rank", "into", "out")),
    )


class LoraSite(ctypes.Structure):
    """`struct lora_site` of lora.c: one linear layer of one adapter, acting on some rows."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "b", "da", "db")),
        *((name, c_long) for name in ("start", "stop", "first", "columns", "rank", "low", "b_t")),
        ("scale", c_float),
    )


class LoraBatch(ctypes.Structure):
    """`struct lora_batch` of lora.c: all adapters of a pass, on one group of layers."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "dy", "y", "low", "dlow", "b_t", "sites")),
        *((name, c_long) for name in ("count", "rows", "into", "out", "ranks")),
    )


class Kernels:
    """One variant of the library. The caller passes float32 tensors that are contiguous: C does not check."""

    def __init__(self, library: ctypes.CDLL, openmp: ctypes.CDLL, variant: str) -> None:
        self.variant = variant
        self.panel, self.lanes, self._widest = (
            ctypes.c_int.in_dll(library, f"{name}_{variant}").value for name in ("panel", "lanes", "widest")
        )

        def bind(name: str, *types: Any) -> Any:
            function = getattr(library, f"{name}_{variant}")
            function.argtypes, function.restype = types, None
            return function

        threads = [ctypes.cast(getattr(openmp, name), c_void_p) for name in OPENMP]
        bind("use_threads", c_void_p, c_void_p, c_void_p)(*threads)
        self._linear = bind("linear", *[c_void_p] * 5, *[c_long] * 3, POINTER(DecodeLora), c_long)
        self._rmsnorm = bind("rmsnorm", *[c_void_p] * 2, c_float, c_void_p, *[c_long] * 3)
        self._rmsnorm_backward = bind("rmsnorm_backward", *[c_void_p] * 2, c_float, *[c_void_p] * 3, *[c_long] * 3)
        self._rope = bind("rope", *[c_void_p] * 3, c_float, *[c_long] * 5)
        self._swiglu = bind("swiglu", *[c_void_p] * 2, *[c_long] * 3)
        self._swiglu_backward = bind("swiglu_backward", *[c_void_p] * 3, *[c_long] * 3)
        self._attend = bind("attend", POINTER(Attention), c_long)
        self._lora_decode = bind("lora_decode", POINTER(DecodeLora), c_long)
        self._lora_forward = bind("lora_forward", POINTER(LoraBatch), c_long)
        self._lora_backward = bind("lora_backward", POINTER(LoraBatch), c_long)

    def in_panels(self, weight_OD: Tensor) -> Tensor:
        """Return a copy of a weight in the order in which `linear` reads it [panels, D, panel]."""
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
        residual_BO: Tensor | None = None,
        lora: DecodeLora | None = None,
    ) -> Tensor:
        """Return x·Wᵀ + b + residual + what the adapters add."""
        rows, width = x_BD.shape
        y_BO = torch.empty(rows, out)
        x, y = x_BD.data_ptr(), y_BO.data_ptr()
        bias, residual = _pointer(bias_O), _pointer(residual_BO)
        if lora is not None:
            lora.x, lora.y = x, y
        lora_pointer = None if lora is None else byref(lora)
        self._linear(x, panels.data_ptr(), bias, residual, y, rows, out, width, lora_pointer, torch.get_num_threads())
        return y_BO

    def rmsnorm(self, x_ND: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        y_ND = torch.empty_like(x_ND)
        self._rmsnorm(x_ND.data_ptr(), gain_D.data_ptr(), eps, y_ND.data_ptr(), *x_ND.shape, _threads(x_ND))
        return y_ND

    def rmsnorm_backward(
        self, x_ND: Tensor, gain_D: Tensor, eps: float, dy_ND: Tensor, residual_ND: Tensor | None
    ) -> Tensor:
        """Return dx + residual, written over `dy_ND`."""
        dy, residual = dy_ND.data_ptr(), _pointer(residual_ND)
        self._rmsnorm_backward(x_ND.data_ptr(), gain_D.data_ptr(), eps, dy, residual, dy, *x_ND.shape, _threads(x_ND))
        return dy_ND

    def rope(self, qkv_NO: Tensor, cos_N1W: Tensor, sin_N1W: Tensor, heads: int, width: int, *, is_back: bool) -> None:
        """Rotate the first `heads` heads of every row, in place."""
        rows, stride = qkv_NO.shape
        assert cos_N1W.shape == sin_N1W.shape == (rows, 1, width // 2)  # the kernel would read past their end
        pointers = qkv_NO.data_ptr(), cos_N1W.data_ptr(), sin_N1W.data_ptr()
        self._rope(*pointers, -1.0 if is_back else 1.0, rows, heads, width, stride, _threads(qkv_NO))

    def swiglu(self, gate_up_NF: Tensor) -> Tensor:
        """Return silu(gate)·up."""
        rows, width = gate_up_NF.shape[0], gate_up_NF.shape[1] // 2
        y_NF = torch.empty(rows, width)
        self._swiglu(gate_up_NF.data_ptr(), y_NF.data_ptr(), rows, width, _threads(gate_up_NF))
        return y_NF

    def swiglu_backward(self, gate_up_NF: Tensor, dy_NF: Tensor) -> Tensor:
        """Return the gradients of gate and up, side by side."""
        dgate_up_NF = torch.empty_like(gate_up_NF)
        pointers = gate_up_NF.data_ptr(), dy_NF.data_ptr(), dgate_up_NF.data_ptr()
        self._swiglu_backward(*pointers, *dy_NF.shape, _threads(gate_up_NF))
        return dgate_up_NF

    def lora_forward(self, batch: LoraBatch) -> None:
        self._lora_forward(byref(batch), torch.get_num_threads())

    def lora_backward(self, batch: LoraBatch) -> None:
        self._lora_backward(byref(batch), torch.get_num_threads())

    def supports_head_width(self, width: int) -> bool:
        return width % self.lanes == 0 and width <= self._widest

    def supports_gate_width(self, width: int) -> bool:
        return width % self.lanes == 0

    def attend(self, call: Attention) -> None:
        self._attend(byref(call), torch.get_num_threads())

    def lora_decode(self, x_BD: Tensor, y_BO: Tensor, lora: DecodeLora) -> None:
        """Add to `y_BO` what the adapters of a decode step contribute, without a product."""
        lora.x, lora.y = x_BD.data_ptr(), y_BO.data_ptr()
        self._lora_decode(byref(lora), torch.get_num_threads())


SINGLE_THREAD_UP_TO = 1 << 15
"""Numbers up to which one thread finishes before others have woken up."""


def _threads(x: Tensor) -> int:
    return 1 if x.numel() <= SINGLE_THREAD_UP_TO else torch.get_num_threads()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def find(variant: str = "auto") -> Kernels | None:
    """Return the kernels for this machine. If there are none, log the reason once and return None."""
    try:
        return _load(variant)
    except (OSError, AttributeError, ValueError) as error:
        logger.warning("The C kernels are not used (%s): torch does their work, more slowly.", error)
        return None


def _load(variant: str) -> Kernels:
    target = build.this_machine()
    if target not in build.TARGETS:
        raise OSError(f"there are none for {target}")
    able = [name for name in supported_variants(target) if variant in ("auto", name)]
    if not able:
        raise OSError("this processor has none of " + ", ".join(build.TARGETS[target].variants))
    path = build.library_path(target)
    if not path.exists():
        raise OSError("they were not built when tinkex was installed; `make kernels` builds them, with a C compiler")
    library = ctypes.CDLL(str(path))
    digest = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, f"digest_{able[0]}")))
    if digest.decode() != build.source_digest():
        raise OSError(f"{path.name} was built from other sources; run `make kernels`")
    return Kernels(library, _openmp(), able[0])


def supported_variants(target: str) -> list[str]:
    """Return the variants that this processor can run, the fastest first."""
    has = {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",)}.get(torch.backends.cpu.get_cpu_capability(), ())
    return [name for name in build.TARGETS[target].variants if name in (*has, "neon")]  # every aarch64 has NEON


def _openmp() -> ctypes.CDLL:
    """Return the OpenMP library that torch itself calls. Another one may be loaded, whose threads would compete."""
    folder = Path(torch.__file__).parent / "lib"
    for path in (None, folder / "libtorch_cpu.so", folder / "libomp.dylib"):
        if path is None or path.exists():
            library = ctypes.CDLL(None if path is None else str(path))
            if all(hasattr(library, name) for name in OPENMP):
                return library
    raise OSError("torch has loaded no OpenMP with the functions that the kernels call")
