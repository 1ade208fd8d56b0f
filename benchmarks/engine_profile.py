"""Where the engine's time goes: the operations of a training pass, of eight short ones together, and of decode steps.

    python -m benchmarks.engine_profile          (writes benchmarks/results/engine_profile.md)

SmolLM2-135M in float32, adapters of rank 8, in this process, with torch's own profiler; what lies between two
operations (the interpreter) is the line "between".
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from tinkex.engine.process import main as process

process.settle_threads_and_memory()  # as the engine's process does, before torch is loaded

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from benchmarks.engine_training import CACHE, MODEL, datum, rows_of  # noqa: E402
from benchmarks.side_by_side import write  # noqa: E402
from tinkex.engine.contract import SampleSpec, pass_frame  # noqa: E402
from tinkex.engine.frames import Frame, decode  # noqa: E402
from tinkex.engine.models import loaded_model, registry  # noqa: E402
from tinkex.engine.packed.kernels import binding  # noqa: E402
from tinkex.engine.runner_choice import choose_decoder, choose_runner  # noqa: E402
from tinkex.engine.sampling.sampler import Sampler  # noqa: E402
from tinkex.engine.training.trainer import Trainer  # noqa: E402

SHOWN = 12
KERNELS = ("linear", "attend", "rmsnorm", "rmsnorm_backward", "rope", "swiglu", "swiglu_backward")
KERNELS += ("lora_forward", "lora_backward")
STEPS = 16


def run(trainer: Trainer, commands: list[Frame]) -> None:
    for number, command in enumerate(commands):
        trainer.add(number, decode(command.encode()))
    while trainer.has_work:
        for _, reply in trainer.step():
            if isinstance(reply, Exception):
                raise reply


def passes(length: int, rows: int, adapters: int) -> list[Frame]:
    data = [datum(row) for row in rows_of([length] * rows)]
    return [pass_frame("forward_backward", f"a{number}", data, "cross_entropy", None) for number in range(adapters)]


def table(title: str, work: Callable[[], object]) -> list[str]:
    """The dearest operations, by their own time."""
    work()
    began = perf_counter()
    work()
    bare_s = perf_counter() - began
    with profile(activities=[ProfilerActivity.CPU]) as found:
        began = perf_counter()
        work()
        whole_us = (perf_counter() - began) * 1e6
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)
    shown, rest = rows[:SHOWN], rows[SHOWN:]
    lines = [f"## {title}", "", f"{bare_s * 1e3:.0f} ms without the profiler.", "", "| operation | share | calls |"]
    lines.append("|---|---|---|")
    lines += [f"| `{row.key}` | {row.self_cpu_time_total / whole_us:.1%} | {row.count} |" for row in shown]
    others_us, all_us = (sum(row.self_cpu_time_total for row in some) for some in (rest, rows))
    lines.append(f"| {len(rest)} others | {others_us / whole_us:.1%} | {sum(row.count for row in rest)} |")
    lines.append(f"| between | {max(1 - all_us / whole_us, 0):.1%} | |")
    return [*lines, ""]


def named(name: str, own: Callable[..., object]) -> Callable[..., object]:
    """A kernel as the profiler sees operations: it knows nothing of calls that are not torch's."""

    def called(*given: object) -> object:
        with record_function(f"kernel {name}"):
            return own(*given)

    return called


def main() -> None:
    found = binding.find()
    for name in KERNELS if found is not None else ():
        setattr(found, f"_{name}", named(name, getattr(found, f"_{name}")))
    torch.set_num_threads(process.usable_cores())
    loaded = loaded_model.load(registry.resolve(MODEL, CACHE), torch.device("cpu"), torch.float32)
    name = loaded.info.name
    trainer = Trainer({name: loaded}, choose_runner=choose_runner)
    sampler = Sampler({name: loaded}, choose_decoder=choose_decoder)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "adapter")
        shape = {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": False}
        for number in range(8):
            run(trainer, [Frame({"op": "create", "adapter": f"a{number}", "base": name, "seed": number, **shape})])
        run(trainer, [Frame({"op": "save", "adapter": "a0", "folder": saved, "with_optimizer": False})])
        lines += table("forward_backward 8×256", lambda: run(trainer, passes(256, 8, 1)))
        lines += table("Eight tenants, 1×32 each", lambda: run(trainer, passes(32, 1, 8)))
        source = random.Random(3)

        def steps() -> None:
            for _ in range(STEPS):
                sampler.step()

        for number in range(8):
            prompt = tuple(source.randrange(100, 40_000) for _ in range(32))
            sampler.add(number, SampleSpec(base=name, weights=saved, prompt=prompt, max_tokens=64, seed=number))
        sampler.step()
        lines += table(f"{STEPS} steps of 8 rows with one adapter", steps)
    write("engine_profile", "Where the engine's time goes", "engine_profile", "\n".join(lines).rstrip())


if __name__ == "__main__":
    main()
