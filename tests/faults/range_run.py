"""Runs many schedules, several at a time, each lane in a process of its own."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from tests.faults.checker import Expected
from tests.faults.harness import Bench
from tests.faults.schedule import schedule_of
from tests.faults.warm import Warmth


def run_range(seeds: Sequence[int], jobs: int) -> int:
    """Run every seed and print a line for each that broke a promise; returns 1 if there was one."""
    began = time.monotonic()
    with Warmth() as warmth:
        lanes = [_Lane(warmth.address) for _ in range(min(jobs, len(seeds)))]
        try:
            expected = lanes[0].expectations()
            seconds, broken = _share_out(seeds, lanes, expected)
        finally:
            for lane in lanes:
                lane.close()
    taken_s = time.monotonic() - began
    print(
        f"{len(seconds)} schedules from seed {seeds[0]}, {len(broken)} with violations {broken or ''}; "
        f"{statistics.median(seconds):.1f} s each (median), {max(seconds):.1f} s at most, {taken_s:.0f} s in all"
    )
    return 1 if broken else 0


def _share_out(
    seeds: Sequence[int], lanes: list[_Lane], expected: dict[int, Expected]
) -> tuple[list[float], list[int]]:
    """Give every free lane the next seed until there is none."""
    waiting, seconds, broken = list(seeds), [], []
    busy: dict[Connection, tuple[_Lane, int]] = {}
    idle = list(lanes)
    while waiting or busy:
        while waiting and idle:
            lane, seed = idle.pop(), waiting.pop(0)
            lane.connection.send((seed, expected))
            busy[lane.connection] = (lane, seed)
        for ready in multiprocessing.connection.wait(list(busy)):
            assert isinstance(ready, Connection)
            lane, seed = busy.pop(ready)
            violations, taken_s, text = lane.receive(seed)
            seconds.append(taken_s)
            if violations:
                broken.append(seed)
                print(text, flush=True)
            elif sys.stdout.isatty():
                print(text, flush=True)
            idle.append(lane)
    return seconds, broken


class _Lane:
    """A process that runs one schedule after the other."""

    def __init__(self, warmth: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, warmth))
        self._process.start()
        theirs.close()

    def expectations(self) -> dict[int, Expected]:
        self.connection.send(None)
        expected: dict[int, Expected] = self.connection.recv()
        return expected

    def receive(self, seed: int) -> tuple[int, float, str]:
        try:
            result: tuple[int, float, str] = self.connection.recv()
            return result
        except EOFError:
            raise AssertionError(f"the process that ran seed {seed} is gone") from None

    def close(self) -> None:
        self.connection.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


def _work(connection: Connection, warmth: str) -> None:
    bench = Bench(warmth)
    try:
        while True:
            try:
                task = connection.recv()
            except EOFError:
                return
            if task is None:
                connection.send(bench.expectations())
                continue
            seed, expected = task
            outcome = bench.run(schedule_of(seed), expected)
            text = outcome.report()
            if outcome.violations:
                text = f"{outcome.schedule}\n{outcome.timeline}\n{text}"
            connection.send((len(outcome.violations), outcome.seconds, text))
    finally:
        bench.close()
