"""What tenants cost each other: many adapters beside one, a crowd of samples, sampling beside training.

    python -m benchmarks.engine_sharing [--model NAME] [--quick]     (writes benchmarks/results/engine_sharing.md)

Every loop ends by count and by time. `--quick` does less of everything and only prints.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import tinkex
from benchmarks.engine_memory import TINY, WAIT_S, Shape, arguments, report, say, verdict
from benchmarks.side_by_side import timed
from tinkex.client.sampling import SamplingClient
from tinkex.local_service import LocalServiceClient

Pair = tuple[float, float]


def in_turn(
    name: str, one: Callable[[], object], other: Callable[[], object], rounds: int, most_s: float
) -> list[Pair]:
    """Seconds of both in every round, after one round that does not count. At least one round, whatever the time."""
    one()
    other()
    found: list[Pair] = []
    ends = time.monotonic() + most_s
    while len(found) < rounds and (not found or time.monotonic() < ends):
        found.append((timed(one), timed(other)))
        say(f"{name}: round {len(found)} of {rounds}: {found[-1][0]:.2f} s and {found[-1][1]:.2f} s")
    return found


@contextmanager
def meanwhile(work: Callable[[], object], threads: int, most_s: float) -> Iterator[None]:
    """Do `work` again and again in so many threads. Raises if it ran out before the block ended: nothing was shared."""
    over = threading.Event()
    began = threading.Barrier(threads + 1)
    ends = time.monotonic() + most_s

    def loop() -> None:
        began.wait()
        for _ in range(100_000):
            if over.is_set() or time.monotonic() > ends:
                return
            work()

    with ThreadPoolExecutor(threads) as pool:
        loops = [pool.submit(loop) for _ in range(threads)]
        try:
            began.wait()
            time.sleep(0.5)  # until the first requests have reached the engine
            yield
            ran_out = any(one.done() for one in loops)
        finally:
            over.set()
        for one in loops:
            one.result(WAIT_S)
    if ran_out:
        raise RuntimeError(f"The load ended before the measurement: it may last {most_s:.0f} s.")


def ratios(pairs: Sequence[Pair]) -> str:
    """How much faster the second is, round by round."""
    found = sorted(one / other for one, other in pairs)
    return f"**{statistics.median(found):.2f}** ({found[0]:.2f} … {found[-1]:.2f})"


def middle(pairs: Sequence[Pair]) -> float:
    return statistics.median(one / other for one, other in pairs)


def rates(tokens: int, pairs: Sequence[Pair]) -> tuple[float, float]:
    """Tokens per second of both, the medians."""
    first, second = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    return tokens / first, tokens / second


def many_adapters(shape: Shape, service: LocalServiceClient, count: int, rounds: int) -> list[str]:
    trainers = [shape.trainer(service, seed=seed) for seed in range(count)]

    def alone() -> None:
        trainers[0].forward_backward(shape.data(count, 32), "cross_entropy").result(WAIT_S)

    def together() -> None:
        futures = [trainer.forward_backward(shape.data(1, 32), "cross_entropy") for trainer in trainers]
        for future in futures:
            future.result(WAIT_S)

    pairs = in_turn("adapters", alone, together, rounds, 240.0)
    for trainer in trainers:
        trainer.unload_model().result(WAIT_S)
    one, all_of_them = rates(count * 32, pairs)
    return [
        f"## {count} adapters",
        "",
        f"| forward_backward, {len(pairs)} rounds | tokens/s |",
        "|---|---|",
        f"| one adapter, {count}×32 in one call | {one:.0f} |",
        f"| {count} adapters, 1×32 each, sent at once | {all_of_them:.0f} |",
        "",
        f"Ratio {ratios(pairs)}; must 0.75: {verdict(middle(pairs) >= 0.75)}.",
        "",
    ]


def crowd(count: int, few: int, rounds: int) -> list[str]:
    """The same work twice; what differs is how many samples are under way at a time."""
    shape = Shape.of(TINY)
    params = tinkex.SamplingParams(max_tokens=32, temperature=1.0, stop=[])
    with tinkex.local(TINY, ephemeral=True) as service:
        sampler = shape.trainer(service).save_weights_and_get_sampling_client()

        def draw(at_once: int) -> None:
            places = threading.Semaphore(at_once)
            futures = []
            for prompt in shape.fresh(count, 32):
                if not places.acquire(timeout=WAIT_S):
                    raise TimeoutError(f"No sample was answered within {WAIT_S:.0f} s.")
                future = sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, params)
                future.add_done_callback(lambda _: places.release())
                futures.append(future)
            if not all(len(future.result(WAIT_S).sequences[0].tokens) == 32 for future in futures):
                raise RuntimeError("A sample has fewer tokens than were asked for.")

        pairs = in_turn("crowd", lambda: draw(few), lambda: draw(count), rounds, 120.0)
    some, everyone = rates(count * 32, pairs)
    return [
        "## A crowd of samples",
        "",
        f"| tiny model, {count} samples × 32, {len(pairs)} rounds | tokens/s |",
        "|---|---|",
        f"| {few} at a time | {some:.0f} |",
        f"| all {count} at once | {everyone:.0f} |",
        "",
        f"Ratio {ratios(pairs)}; must 1: {verdict(middle(pairs) >= 1)}.",
        "",
    ]


def latencies(shape: Shape, sampler: SamplingClient, count: int, most_s: float) -> list[float]:
    """Seconds of single samples, one after another, in order of size."""
    params = tinkex.SamplingParams(max_tokens=32, temperature=1.0, stop=[])
    ends = time.monotonic() + most_s
    found: list[float] = []

    def ask(prompt: tinkex.ModelInput) -> None:
        sampler.sample(prompt, 1, params).result(WAIT_S)

    while len(found) < count and (not found or time.monotonic() < ends):
        prompt = tinkex.ModelInput.from_ints(shape.fresh(1, 32)[0])
        found.append(timed(partial(ask, prompt)))
    return sorted(found)


def p95(ordered: Sequence[float]) -> float:
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def sampling_beside_training(shape: Shape, service: LocalServiceClient, count: int) -> list[str]:
    sampler = shape.trainer(service).save_weights_and_get_sampling_client()
    latencies(shape, sampler, 3, 60.0)
    idle = latencies(shape, sampler, count, 90.0)
    say(f"latency: {len(idle)} idle, p95 {p95(idle):.2f} s")
    with tinkex.ServiceClient(base_url=service.base_url, api_key=service.api_key, telemetry=False) as second:
        trainer = shape.trainer(second, seed=1)

        def train() -> None:
            trainer.forward_backward(shape.data(8, 256), "cross_entropy").result(WAIT_S)

        train()
        with meanwhile(train, 1, WAIT_S):
            busy = latencies(shape, sampler, count, 180.0)
    say(f"latency: {len(busy)} beside training, p95 {p95(busy):.2f} s")
    lines = [
        "## Samples while somebody trains",
        "",
        "| one sample after another, prompt 32, 32 new tokens | samples | p50, ms | p95, ms | largest, ms |",
        "|---|---|---|---|---|",
    ]
    for name, found in (("idle", idle), ("while a second client sends forward_backward 8×256", busy)):
        shown = " | ".join(f"{1e3 * value:.0f}" for value in (statistics.median(found), p95(found), found[-1]))
        lines.append(f"| {name} | {len(found)} | {shown} |")
    ratio = p95(busy) / p95(idle)
    return [*lines, "", f"Ratio of the p95: **{ratio:.2f}**; must 3: {verdict(ratio <= 3)}.", ""]


def training_beside_sampling(shape: Shape, service: LocalServiceClient, rounds: int) -> list[str]:
    trainer = shape.trainer(service, seed=2)
    sampler = trainer.save_weights_and_get_sampling_client()
    params = tinkex.SamplingParams(max_tokens=64, temperature=1.0, stop=[])
    drawn: list[int] = []
    """Tokens of every chunk; growing it is safe from any thread."""
    sampled_rates: list[float] = []

    def train() -> None:
        trainer.forward_backward(shape.data(8, 256), "cross_entropy").result(WAIT_S)

    def stream() -> None:
        prompt = tinkex.ModelInput.from_ints(shape.fresh(1, 32)[0])
        # Grows with every chunk, as they come.
        drawn.extend(len(chunk.tokens) for chunk in sampler.stream(prompt, params))

    train()
    pairs: list[Pair] = []
    ends = time.monotonic() + 240.0
    while len(pairs) < rounds and (not pairs or time.monotonic() < ends):
        idle_s = timed(train)
        with meanwhile(stream, 8, WAIT_S):
            at = len(drawn)
            busy_s = timed(train)
            sampled_rates.append(sum(drawn[at:]) / busy_s)
        pairs.append((idle_s, busy_s))
        say(f"training: round {len(pairs)} of {rounds}: {idle_s:.2f} s idle, {busy_s:.2f} s beside streams")
    idle, busy = rates(2048, pairs)
    return [
        "## Training while samples stream",
        "",
        f"| forward_backward 8×256, {len(pairs)} rounds | tokens/s |",
        "|---|---|",
        f"| idle | {idle:.0f} |",
        f"| while 8 samples stream all the time | {busy:.0f} |",
        f"| what the streams draw meanwhile | {statistics.median(sampled_rates):.0f} |",
        "",
        f"Ratio {ratios(pairs)}; must 0.4: {verdict(middle(pairs) >= 0.4)}.",
    ]


def main() -> None:
    given = arguments(__doc__)
    quick, shape = given.quick, Shape.of(given.model)
    lines = [f"Model `{given.model}` in float32, adapters of rank 8, through HTTP with our client.", ""]
    lines += crowd(512, 64, 1 if quick else 5)
    with tinkex.local(given.model, ephemeral=True) as service:
        lines += many_adapters(shape, service, 64, 1 if quick else 5)
        lines += sampling_beside_training(shape, service, 10 if quick else 40)
        lines += training_beside_sampling(shape, service, 1 if quick else 3)
    report("engine_sharing", "What tenants cost each other", lines, quick=quick)


if __name__ == "__main__":
    main()
