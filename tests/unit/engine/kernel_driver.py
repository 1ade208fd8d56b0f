"""The NEON kernels on a machine of another kind: built for aarch64, run by qemu, called by the tests like any variant.

`DriverKernels` stands in for the library: it takes the same pointers, sends the numbers behind them to the driver
(kernel_driver.c) and writes the results back. So the tests of the other variants are its tests too.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinkex.engine.packed.kernels import build
from tinkex.engine.packed.kernels.binding import Kernels, LoraSite

SOURCE = Path(__file__).with_suffix(".c")
TARGET = "aarch64-linux"


@functools.cache
def emulator() -> str | None:
    return shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


@functools.cache
def cross_compiler() -> list[str] | None:
    if command := shutil.which("aarch64-linux-gnu-gcc"):
        return [command]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
    return None


def missing_reason() -> str | None:
    """Return why the NEON kernels cannot be run here, or None if they can."""
    if emulator() is None:
        return "no qemu-aarch64 (as root, `make kernels-aarch64` installs it)"
    return "no C compiler for aarch64 (as root, `make kernels-aarch64` installs it)" if not cross_compiler() else None


def start(folder: Path) -> DriverKernels:
    """Build the driver and the kernels for aarch64, and start it."""
    command, name = cross_compiler(), emulator()
    assert command is not None and name is not None
    objects = build.compile_objects(TARGET, command, str(folder), "-Werror")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-static", "-pthread", "-DVARIANT=neon"]
    subprocess.run([*command, *flags, str(SOURCE), *objects, "-o", str(folder / "driver")], cwd=folder, check=True)
    return DriverKernels([name, str(folder / "driver")])


def floats(pointer: int | None, count: int) -> bytes:
    return b"" if pointer is None else ctypes.string_at(pointer, 4 * count)


def longs(pointer: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(pointer))


def packed(part: int | float | bytes | list[int]) -> bytes:
    if isinstance(part, int):
        return struct.pack("<q", part)
    if isinstance(part, list):
        part = struct.pack(f"<{len(part)}q", *part)
    elif isinstance(part, float):
        part = struct.pack("<f", part)
    return struct.pack("<q", len(part)) + part


class DriverKernels(Kernels):
    def __init__(self, command: Sequence[str]) -> None:
        self.variant, self._widest = "neon", 512
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        about = self._ask("about", 1, [], 16 + 64)
        self.panel, self.lanes = struct.unpack("<qq", about[:16])
        self.digest = about[16:].decode()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)

    def _ask(self, name: str, threads: int, parts: Sequence[Any], size: int) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(name.encode().ljust(32, b"\0") + packed(threads) + b"".join(map(packed, parts)))
        self._process.stdin.flush()
        result = self._process.stdout.read(size)
        assert len(result) == size, f"{name}: the driver ended with {self._process.wait(10)}"
        return result

    def _run(self, name: str, threads: int, parts: Sequence[Any], *results: tuple[int | None, int]) -> None:
        """Call a kernel, and write what it returns to where the results belong: a pointer and a count each."""
        written = [(pointer, 4 * count) for pointer, count in results if pointer is not None]
        data, at = self._ask(name, threads, parts, sum(size for _, size in written)), 0
        for pointer, size in written:
            ctypes.memmove(pointer, data[at : at + size], size)
            at += size

    # The functions of the library, with its arguments

    def _linear(self, x, weight, bias, residual, y, rows, out, into, lora, threads) -> None:  # type: ignore[no-untyped-def]
        parts = [rows, out, into, int(lora is not None), floats(x, rows * into)]
        parts += [floats(weight, -(-out // self.panel) * into * self.panel), floats(bias, out)]
        parts += [floats(residual, rows * out), *([] if lora is None else self._decode_lora(lora._obj))]
        self._run("linear", threads, parts, (y, rows * out))

    def _lora_decode(self, lora, threads) -> None:  # type: ignore[no-untyped-def]
        call = lora._obj
        rows = 1 + max(longs(call.order, longs(call.starts, call.adapters + 1)[-1]))
        parts = [rows, floats(call.x, rows * call.into), floats(call.y, rows * call.out), *self._decode_lora(call)]
        self._run("lora_decode", threads, parts, (call.y, rows * call.out))

    @staticmethod
    def _decode_lora(call: Any) -> list[Any]:
        ranks, starts = call.adapters * call.sites * call.rank, longs(call.starts, call.adapters + 1)
        arrays: list[Any] = [floats(call.down, ranks * call.into), floats(call.up, ranks * call.out)]
        arrays += [longs(call.order, starts[-1]), starts, longs(call.columns, 2 * call.sites)]
        return [*arrays, call.adapters, call.sites, call.rank, call.into, call.out]

    def _attend(self, call, threads) -> None:  # type: ignore[no-untyped-def]
        job = call._obj
        items, half = job.rows * job.heads, job.rows * job.width // 2
        qkv = job.rows * (job.heads + 2 * job.key_heads) * job.width
        cached = job.rows * job.key_heads * job.columns * job.width
        parts = [job.rows, job.heads, job.key_heads, job.width, job.columns, job.column]
        parts += [floats(job.qkv, qkv), floats(job.cosine, half), floats(job.sine, half)]
        parts += [floats(job.keys, cached), floats(job.values, cached), longs(job.lengths, job.rows), job.scale]
        results = [(job.out, items * job.width), (job.largest, items), (job.sum_exp, items)]
        self._run("attend", threads, parts, *results, (job.keys, cached), (job.values, cached), (job.qkv, qkv))

    def _rmsnorm(self, x, gain, eps, y, rows, width, threads) -> None:  # type: ignore[no-untyped-def]
        parts = [rows, width, floats(x, rows * width), floats(gain, width), float(eps)]
        self._run("rmsnorm", threads, parts, (y, rows * width))

    def _rmsnorm_backward(self, x, gain, eps, dy, residual, dx, rows, width, threads) -> None:  # type: ignore[no-untyped-def]
        parts = [rows, width, floats(x, rows * width), floats(gain, width), float(eps)]
        parts += [floats(dy, rows * width), floats(residual, rows * width)]
        self._run("rmsnorm_backward", threads, parts, (dx, rows * width))

    def _rope(self, qkv, cosine, sine, sign, rows, heads, width, stride, threads) -> None:  # type: ignore[no-untyped-def]
        parts = [rows, heads, width, stride, int(sign), floats(qkv, rows * stride)]
        parts += [floats(cosine, rows * width // 2), floats(sine, rows * width // 2)]
        self._run("rope", threads, parts, (qkv, rows * stride))

    def _swiglu(self, gate_up, y, rows, width, threads) -> None:  # type: ignore[no-untyped-def]
        self._run("swiglu", threads, [rows, width, floats(gate_up, 2 * rows * width)], (y, rows * width))

    def _swiglu_backward(self, gate_up, dy, dx, rows, width, threads) -> None:  # type: ignore[no-untyped-def]
        parts = [rows, width, floats(gate_up, 2 * rows * width), floats(dy, rows * width)]
        self._run("swiglu_backward", threads, parts, (dx, 2 * rows * width))

    def _lora_forward(self, call, threads) -> None:  # type: ignore[no-untyped-def]
        batch = call._obj
        y = batch.y, batch.rows * batch.out
        self._run("lora_forward", threads, [*self._lora_batch(batch), b"", floats(*y)], y)

    def _lora_backward(self, call, threads) -> None:  # type: ignore[no-untyped-def]
        batch = call._obj
        dx = batch.y, batch.rows * batch.into
        parts = [*self._lora_batch(batch), floats(batch.dy, batch.rows * batch.out), floats(*dx)]
        gradients = []
        for site in self._sites(batch):
            gradients += [(site.da, site.rank * batch.into), (site.db, site.rank * site.columns)]
        self._run("lora_backward", threads, parts, dx, *gradients)

    @staticmethod
    def _sites(batch: Any) -> list[Any]:
        return list((LoraSite * batch.count).from_address(batch.sites))

    def _lora_batch(self, batch: Any) -> list[Any]:
        sites = self._sites(batch)
        transposed = max(site.b_t + site.rank * site.columns for site in sites)
        parts: list[Any] = [batch.count, batch.rows, batch.into, batch.out, batch.ranks, transposed]
        for site in sites:
            a, b = site.rank * batch.into, site.rank * site.columns
            parts += [site.start, site.stop, site.first, site.columns, site.rank, site.low, site.b_t]
            parts += [floats(site.a, a), floats(site.b, b), floats(site.da, a), floats(site.db, b), site.scale]
        return [*parts, floats(batch.x, batch.rows * batch.into)]
