"""How fast vLLM samples on a CPU, beside our own sampler on the same cores.

    python -m benchmarks.vllm_sampling [rounds]          (writes benchmarks/results/vllm_sampling.md)

SmolLM2-135M, adapters of rank 8, prompts of 32 tokens that nobody has sent before. Both are driven over the engine's
pipe, in turns: a row of both before the next, so that a change of the machine's load meets both.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.engine_training import CACHE, MODEL
from benchmarks.side_by_side import write
from tests.cluster.vllm_rig import Rig, last
from tinkex.engine.contract import Engine
from tinkex.engine.host import LocalEngine
from tinkex.engine.models import registry

DRAWN, CONCURRENT = 32, 8
THREADS = 1
"""Of each. With two on busy cores, those of vLLM wait for each other: 8 samples of 32 tokens took over a minute."""
CASES = {"the base model": 0, "one adapter": 1, "eight adapters": 8}


def main(rounds: int = 3) -> None:
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for dtype in ("float32", "bfloat16"):
            model = registry.resolve(MODEL, CACHE)
            trainer = LocalEngine([model], decode_weights=dtype, threads=THREADS)  # it trains in float32 in both
            rig = Rig(model, Path(name, dtype), dtype=dtype, trainer=trainer, threads=THREADS)
            try:
                rig.start()
                for engine, case, rate in rig.run(_measure(rig, rounds)):
                    rows.setdefault((dtype, case), {}).setdefault(engine, []).append(rate)
                    loads.append(os.getloadavg()[0])
            finally:
                rig.close()
            write("vllm_sampling", "How fast vLLM samples on a CPU", "vllm_sampling", _table(rows, loads))


async def _measure(rig: Rig, rounds: int) -> list[tuple[str, str, float]]:
    folders = [await rig.trained(f"speed-{number}", 8, steps=1) for number in range(max(CASES.values()))]
    source, results = random.Random(3), []
    engines: dict[str, Engine] = {"ours": rig.trainer, "vLLM": rig.engine}

    async def sample(engine: Engine, adapters: int) -> None:
        work = []
        for number in range(CONCURRENT):
            weights = folders[number % adapters] if adapters else None
            prompt = tuple(source.randrange(100, 40_000) for _ in range(32))
            work.append(last(engine.sample(rig.spec(weights, prompt=prompt, max_tokens=DRAWN))))
        assert all(row.length == DRAWN for sampled in await asyncio.gather(*work) for row in sampled.sequences)

    for adapters in CASES.values():  # what is done once, such as loading and proving an adapter, is not the question
        for engine in engines.values():
            await sample(engine, adapters)
    for _ in range(rounds):
        for case, adapters in CASES.items():
            for name, engine in engines.items():
                seconds = await _seconds(lambda engine=engine, adapters=adapters: sample(engine, adapters))  # type: ignore[misc]
                results.append((name, case, CONCURRENT * DRAWN / seconds))
                print(f"{name}, {case}: {results[-1][2]:.0f} tokens/s", file=sys.stderr, flush=True)
    return results


async def _seconds(work: Callable[[], Awaitable[None]]) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await work()
    return loop.time() - began


def _table(rows: dict[tuple[str, str], dict[str, list[float]]], loads: list[float]) -> str:
    lines = [
        f"{CONCURRENT} samples at a time, {DRAWN} tokens each, in turns, one thread each. Ours in bfloat16: "
        "trained in float32, `--decode-weights bfloat16`. "
        f"Load average of the machine meanwhile: {min(loads):.1f} to {max(loads):.1f}.",
        "",
        "| numbers | weights | ours, tokens/s (smallest … largest) | vLLM | ours ÷ vLLM |",
        "|---|---|---|---|---|",
    ]
    for (dtype, case), rates in rows.items():
        ours, theirs = rates["ours"], rates["vLLM"]
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        lines.append(f"| {dtype} | {case} | {_spread(ours)} | {_spread(theirs)} | **{ratio:.2f}** |")
    return "\n".join(lines)


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):.0f} ({min(rates):.0f} … {max(rates):.0f})"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
