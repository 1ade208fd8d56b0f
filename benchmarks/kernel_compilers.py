"""The C kernels as each compiler of this machine builds them, side by side.

    python -m benchmarks.kernel_compilers        (prints a table; `pip install ziglang` adds zig to it)

The shapes are those of SmolLM2-135M with adapters of rank 8. Compilers take turns, call by call, on one thread, whose
own time is counted: other work on the machine disturbs little. The table has the fastest and the median call of each.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import thread_time

import torch

from tinkex.engine.adapters.lora import LoraWeights, Segment
from tinkex.engine.contract import LoraSpec
from tinkex.engine.packed.kernels import binding, build
from tinkex.engine.packed.kernels.binding import Kernels
from tinkex.engine.packed.lora_decode import StackedLora
from tinkex.engine.packed.lora_train import LoraCall
from tinkex.engine.packed.weights import Group

ROUNDS = 60
LAYERS = 30
"""As many weights as the model has layers: they do not fit into the cache, in a decode step neither."""
SITES = {"gate": slice(0, 1536), "up": slice(1536, 3072)}


def built() -> dict[str, Kernels]:
    """Return the kernels for this processor as each compiler builds them."""
    target, by_compiler, programs = build.this_machine(), {}, set()
    for command in build.compilers(target):
        program = Path(shutil.which(command[0]) or command[0]).resolve()
        if program in programs:  # cc is gcc or clang
            continue
        programs.add(program)
        with tempfile.TemporaryDirectory() as folder:
            name = build.build(target, Path(folder, "library"), [command])
            library = ctypes.CDLL(str(Path(folder, "library")))
        for variant in binding.supported_variants(target):
            by_compiler[f"{name}, {variant}"] = Kernels(library, binding._openmp(), variant)
    return by_compiler


PANELS: dict[str, list[torch.Tensor]] = {}


def panels_of(kernels: Kernels) -> list[torch.Tensor]:
    """Return the weights of all layers, the same memory for all compilers: where it lies decides more than they do."""
    if kernels.variant not in PANELS:
        PANELS[kernels.variant] = [kernels.in_panels(torch.randn(3072, 576)) for _ in range(LAYERS)]
    return PANELS[kernels.variant]


def adapter(rank: int = 8) -> LoraWeights:
    pairs = {}
    for site, columns in SITES.items():
        pairs[site] = torch.randn(rank, 576), torch.randn(columns.stop - columns.start, rank)
        for part in pairs[site]:
            part.grad = torch.zeros_like(part)
    return LoraWeights(LoraSpec(rank=rank), pairs)


def calls(kernels: Kernels) -> dict[str, Callable[[], object]]:
    """Return the work to time: a few rows as in decoding, and many as in training."""
    adapters = [adapter() for _ in range(8)]
    weights = panels_of(kernels)
    lora = StackedLora([SITES], [576], kernels)
    lora.prepare(adapters)
    x_BD, x_ND, dy_NO = torch.randn(8, 576), torch.randn(2048, 576), torch.randn(2048, 3072)
    segments = [Segment(own, 256 * number, 256 * number + 256) for number, own in enumerate(adapters)]
    dx_ND, gate_up_NF, gain_D = torch.zeros_like(x_ND), torch.randn(2048, 3072), torch.ones(576)

    def backward() -> None:
        call = LoraCall(Group(torch.empty(0), None, SITES), segments, x_ND)
        call.batch.dy, call.batch.y, call.batch.out = dy_NO.data_ptr(), dx_ND.data_ptr(), 3072
        kernels.lora_backward(call.batch)

    return {
        "gate and up of 30 layers, 8 rows": lambda: [kernels.linear(x_BD, panels, 3072) for panels in weights],
        "the same, each row with its own adapter": lambda: [
            kernels.linear(x_BD, panels, 3072, None, None, lora.kernel_args(0)) for panels in weights
        ],
        "lora_backward, 2048 tokens, 8 adapters": backward,
        "swiglu, 2048 tokens": lambda: kernels.swiglu(gate_up_NF),
        "rmsnorm, 2048 tokens": lambda: kernels.rmsnorm(x_ND, gain_D, 1e-5),
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    work = {name: calls(kernels) for name, kernels in built().items()}
    print("| work | built by | fastest ms | median ms |\n|---|---|---|---|")
    for title in next(iter(work.values())):
        times: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(ROUNDS):
            for name, its_calls in work.items():
                began = thread_time()
                its_calls[title]()
                times[name].append(1000 * (thread_time() - began))
        for name, taken in times.items():
            print(f"| {title} | {name} | {min(taken):.3f} | {statistics.median(taken):.3f} |")


if __name__ == "__main__":
    main()
