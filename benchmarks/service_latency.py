"""How long small operations take through the service, journal included, and how soon it is ready.

    python -m benchmarks.service_latency          (part of `make bench`; writes benchmarks/results/service_latency.md)

The tiny model, our client, one call at a time: what is measured is everything but maths.
"""

from __future__ import annotations

import datetime as dt
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tinkex
from benchmarks.client_cost import commit, cpu_model
from tests.integration.service.live import LiveServer

ROUNDS = 5
CALLS = 60
RESULTS = Path(__file__).parent / "results" / "service_latency.md"
DATUM = tinkex.Datum(
    tinkex.ModelInput.from_ints(list(range(20, 52))), {"target_tokens": list(range(21, 53)), "weights": [1.0] * 32}
)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def one_round(url: str) -> dict[str, list[float]]:
    """Milliseconds of every call, by kind."""
    taken: dict[str, list[float]] = {"optim_step": [], "forward_backward 1×32": [], "sample 8 + 8": []}
    with tinkex.ServiceClient(base_url=url, api_key="tml-bench") as service:
        training = service.create_lora_training_client(base_model="tinkex/tiny", rank=8)
        sampler = service.create_sampling_client(base_model="tinkex/tiny")
        prompt, params = tinkex.ModelInput.from_ints(list(range(20, 28))), tinkex.SamplingParams(max_tokens=8, stop=[])
        for _ in range(CALLS):
            backward = timed(lambda: training.forward_backward([DATUM], "cross_entropy").result())
            taken["forward_backward 1×32"].append(backward)
            step = timed(lambda: training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result())
            taken["optim_step"].append(step)
            taken["sample 8 + 8"].append(timed(lambda: sampler.sample(prompt, 1, params).result()))
    return taken


def main() -> int:
    ready: list[float] = []
    rounds: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            started = time.perf_counter()
            with LiveServer(Path(folder) / f"data{number}") as server:
                ready.append(time.perf_counter() - started)
                rounds.append(one_round(server.url))
    text = report(ready, rounds)
    RESULTS.write_text(text)
    print(text)
    return 0


def report(ready: list[float], rounds: list[dict[str, list[float]]]) -> str:
    lines = [
        "# How long small operations take",
        "",
        f"Written by `python -m benchmarks.service_latency` on {dt.date.today()}: 2 cores, {cpu_model()}, "
        f"Python {platform.python_version()}, commit {commit()}.",
        f"Tiny model, SQLite, our client, one call at a time, {ROUNDS} servers, {CALLS} calls of each kind on each. "
        "Median of the rounds (smallest … largest).",
        "",
        "| what | p50 | p95 |",
        "|---|---|---|",
    ]
    for kind in rounds[0]:
        middles = [statistics.median(taken[kind]) for taken in rounds]
        highs = [sorted(taken[kind])[int(0.95 * CALLS)] for taken in rounds]
        lines.append(f"| {kind} | {_spread(middles, 'ms')} | {_spread(highs, 'ms')} |")
    lines += ["", f"From `tinkex serve` to healthz 200: {_spread(ready, 's')}.", ""]
    return "\n".join(lines)


def _spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):.1f} {unit} ({min(values):.1f} … {max(values):.1f})"


if __name__ == "__main__":
    raise SystemExit(main())
