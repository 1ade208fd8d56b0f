"""How speed and memory grow: with batch, sequence length, adapters, rank, and samples at once.

    python -m benchmarks.engine_growth [--model NAME] [--quick]     (writes benchmarks/results/engine_growth.md)

Each curve has a server of its own and a share of twelve minutes. What a curve leaves of its share the next one may use;
a point that would not fit is left out, and the table says so. `--quick` has shorter shares and only prints.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import tinkex
from benchmarks.engine_memory import (
    GB,
    WAIT_S,
    Shape,
    arguments,
    engine_pid,
    forget_peak,
    peak_bytes,
    report,
    resident_bytes,
    sample_all,
    say,
)
from benchmarks.side_by_side import timed
from tinkex.client.training import TrainingClient
from tinkex.local_service import LocalServiceClient

RUNS = 3
SHORT = 32
"""Tokens of a sequence where adapters are counted, of a prompt, and of what is drawn."""


@dataclass(frozen=True)
class Point:
    name: str
    tokens: int
    work: Callable[[], object]


Points = Callable[[Shape, LocalServiceClient], Iterator[Point]]
"""Made one by one: what a point needs, such as an adapter, is there only from then on."""


@dataclass(frozen=True)
class Curve:
    title: str
    column: str
    share_s: float
    points: Points


def train(trainer: TrainingClient, shape: Shape, rows: int, length: int) -> None:
    trainer.forward_backward(shape.data(rows, length), "cross_entropy").result(WAIT_S)


def by_batch(shape: Shape, service: LocalServiceClient) -> Iterator[Point]:
    trainer = shape.trainer(service)
    for rows in (1, 2, 4, 8, 16):
        yield Point(f"{rows}×128", rows * 128, partial(train, trainer, shape, rows, 128))


def by_length(shape: Shape, service: LocalServiceClient) -> Iterator[Point]:
    trainer = shape.trainer(service)
    for length in (128, 256, 512, 1024, 2048, 4096):
        if length <= shape.context:
            yield Point(f"1×{length}", length, partial(train, trainer, shape, 1, length))


def by_adapters(shape: Shape, service: LocalServiceClient) -> Iterator[Point]:
    trainers: list[TrainingClient] = []

    def work(rows: int) -> None:
        futures = [each.forward_backward(shape.data(rows, SHORT), "cross_entropy") for each in trainers]
        for future in futures:
            future.result(WAIT_S)

    for count in (1, 4, 16, 64):
        trainers.extend(shape.trainer(service, seed=seed) for seed in range(len(trainers), count))
        rows = 2048 // SHORT // count
        yield Point(f"{count} × {rows}×{SHORT}", 2048, partial(work, rows))


def by_rank(shape: Shape, service: LocalServiceClient) -> Iterator[Point]:
    for rank in (1, 8, 32, 128):
        trainer = shape.trainer(service, rank)
        yield Point(f"{rank}", 1024, partial(train, trainer, shape, 8, 128))
        trainer.unload_model().result(WAIT_S)


def by_samples(shape: Shape, service: LocalServiceClient) -> Iterator[Point]:
    sampler = shape.trainer(service).save_weights_and_get_sampling_client()

    def draw(count: int) -> None:
        if sample_all(sampler, shape.fresh(count, SHORT), SHORT) != count:
            raise RuntimeError("A sample has fewer tokens than were asked for.")

    for count in (1, 4, 16, 64, 256, 512):
        yield Point(f"{count}", count * SHORT, partial(draw, count))


CURVES = (
    Curve("Training: batch, sequences of 128 tokens", "batch", 80, by_batch),
    Curve("Training: length, one sequence", "tokens", 150, by_length),
    Curve(f"Training: adapters, 2,048 tokens in all, sequences of {SHORT}", "adapters", 130, by_adapters),
    Curve("Training: rank, 8×128", "rank", 80, by_rank),
    Curve(f"Sampling: samples at once, prompts of {SHORT}, {SHORT} new tokens each", "samples", 280, by_samples),
)


def draw_curve(curve: Curve, shape: Shape, most_s: float) -> tuple[list[str], float]:
    """The table of a curve, and the seconds left. They begin when the server is ready; a run that has begun may end."""
    lines = [
        f"## {curve.title}",
        "",
        f"| {curve.column} | tokens/s (slowest … fastest) | runs | engine's peak, GB | after, GB |",
        "|---|---|---|---|---|",
    ]
    rate = 0.0
    with tinkex.local(shape.name, ephemeral=True) as service:
        pid = engine_pid(service)
        ends = time.monotonic() + most_s
        for point in curve.points(shape, service):
            # Of a curve that does not fall off, the last point's rate tells how long the next one takes.
            if rate and time.monotonic() + point.tokens / rate > ends:
                lines.append(f"| {point.name} | left out: no time | 0 | | |")
                say(f"{curve.title}: {point.name}: left out")
                continue
            if not rate:
                point.work()  # what is done once, such as laying weights out, is not the question
            forget_peak(pid)
            seconds = [timed(point.work)]
            while len(seconds) < RUNS and time.monotonic() + max(seconds) < ends:
                seconds.append(timed(point.work))
            rate = point.tokens / statistics.median(seconds)
            slowest, fastest = point.tokens / max(seconds), point.tokens / min(seconds)
            lines.append(
                f"| {point.name} | **{rate:.0f}** ({slowest:.0f} … {fastest:.0f}) "
                f"| {len(seconds)} | {peak_bytes(pid) / GB:.2f} | {resident_bytes(pid) / GB:.2f} |"
            )
            say(f"{curve.title}: {point.name}: {rate:.0f} tokens/s, {len(seconds)} runs")
        left_s = ends - time.monotonic()
    return [*lines, ""], left_s


def main() -> None:
    given = arguments(__doc__)
    shape = Shape.of(given.model)
    lines = [
        f"Model `{given.model}` in float32, adapters of rank 8 unless said otherwise, through HTTP with our client. "
        f"Median of {RUNS} runs where time allows. Memory is the engine's process alone: the highest during the runs, "
        "and what stays.",
        "",
    ]
    left_s = 0.0
    for curve in CURVES:
        table, left_s = draw_curve(curve, shape, left_s + curve.share_s / (60 if given.quick else 1))
        lines += table
    report("engine_growth", "How speed and memory grow", lines[:-1], quick=given.quick)


if __name__ == "__main__":
    main()
