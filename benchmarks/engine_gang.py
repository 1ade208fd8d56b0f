"""An engine in two processes, each with half of the weights, beside one with two threads, on the same two cores.

    python -m benchmarks.engine_gang [--rounds 3]     (prints; Linux only: memory is the kernel's, from /proc)

The engines take turns within each round, so that what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from pathlib import Path

from benchmarks.engine_training import CACHE, MODEL
from tinkex.engine.contract import ModelInfo, SampleSpec, pass_frame
from tinkex.engine.frames import Frame
from tinkex.engine.host import LocalEngine
from tinkex.engine.models import registry
from tinkex.types.inputs import Datum, ModelInput

ROWS, LENGTH, RANK = 8, 64, 8
SAMPLES, NEW_TOKENS = 4, 4


def data(vocab_size: int) -> list[Datum]:
    dice = random.Random(0)
    rows = [[dice.randrange(vocab_size) for _ in range(LENGTH + 1)] for _ in range(ROWS)]
    return [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in rows]


async def timed_round(engine: LocalEngine, info: ModelInfo) -> dict[str, float]:
    """Return the seconds of one pass, one step and some samples."""
    found = {}
    began = time.monotonic()
    await engine.run(pass_frame("forward_backward", "a", data(info.vocab_size), "cross_entropy", None))
    found[f"forward_backward {ROWS}x{LENGTH}"] = time.monotonic() - began
    began = time.monotonic()
    await engine.run(Frame({"op": "optim_step", "adapter": "a", "learning_rate": 1e-4}))
    found["optim_step"] = time.monotonic() - began

    async def sample(seed: int) -> None:
        prompt = tuple(range(100, 132))
        async for _ in engine.sample(SampleSpec(base=info.name, prompt=prompt, max_tokens=NEW_TOKENS, seed=seed)):
            pass

    began = time.monotonic()
    await asyncio.gather(*map(sample, range(SAMPLES)))
    found[f"{SAMPLES} samples of {NEW_TOKENS} tokens"] = time.monotonic() - began
    return found


def memory_mb(pid: int) -> list[float]:
    """Return what each process of an engine has of its own in memory."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for process in (pid, *map(int, children)):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        found.append(next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3)
    return found


async def compare(rounds: int) -> None:
    info = registry.resolve(MODEL, CACHE)
    engines = {
        "one process, two threads": LocalEngine([info], device="cpu", threads=2),
        "two processes, one thread each": LocalEngine([info], device="cpu", threads=1, devices=2),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    try:
        for name, engine in engines.items():
            await engine.start()
            print(f"{name}: {', '.join(f'{size:.0f} MB' for size in memory_mb(engine.state.pid))} after the start")
            await engine.run(Frame({"op": "create", "adapter": "a", "base": info.name, "rank": RANK, "seed": 0}))
            await timed_round(engine, info)
        for _ in range(rounds):
            for name, engine in engines.items():
                found[name].append(await timed_round(engine, info))
        for name, engine in engines.items():
            print(f"{name}: {', '.join(f'{size:.0f} MB' for size in memory_mb(engine.state.pid))} at the end")
            for kind in found[name][0]:
                times = [times[kind] for times in found[name]]
                print(f"  {kind}: median {statistics.median(times):.3f} s, {min(times):.3f} to {max(times):.3f}")
        print(f"load {os.getloadavg()[0]:.1f}")
    finally:
        for engine in engines.values():
            await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(compare(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
