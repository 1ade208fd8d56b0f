"""Runs many schedules, several at a time, each lane in a process of its own."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType

from tests.faults.broken import PROTECTIONS
from tests.faults.checker import Expected
from tests.faults.harness import Bench, Outcome
from tests.faults.schedule import Schedule, schedule_of
from tests.faults.warm import Warmth

_OURS = ("TypeError", "AttributeError", "NameError")
MOST_SEEDS = 100
"""How many schedules may try to show what a missing protection breaks."""


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """What a lane reports of one schedule."""

    seed: int
    promises: list[str]
    """Of its violations."""
    patch_errors: list[str]
    """Errors of a call that only a patch of ours can have caused: a run with one proves nothing."""
    faults: dict[str, int]
    """Kind → how many of them happened."""
    seconds: float
    stall_cpu_s: float
    """The longest that a callback computed on a loop."""
    text: str


def run_range(seeds: Sequence[int], jobs: int) -> int:
    """Run every seed and print the report of each that broke a promise; returns 1 if there was one."""
    began = time.monotonic()
    with Warmth() as warmth:
        lanes = [_Lane(warmth.address) for _ in range(min(jobs, len(seeds)))]
        try:
            expected = lanes[0].expectations()
            results = list(_share_out(seeds, lanes, expected))
        finally:
            for lane in lanes:
                lane.close()
    broken = sorted(result.seed for result in results if result.promises)
    print(_summary(seeds, results, broken, time.monotonic() - began))
    return 1 if broken else 0


def _summary(seeds: Sequence[int], results: list[SeedResult], broken: list[int], taken_s: float) -> str:
    faults = Counter[str]()
    for result in results:
        faults.update(result.faults)
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items()))
    seconds, stalls_s = [result.seconds for result in results], [result.stall_cpu_s for result in results]
    return (
        f"{sum(faults.values())} faults: {kinds}\n"
        f"longest time that a callback computed on a loop: {max(stalls_s) * 1e3:.0f} ms\n"
        f"{len(results)} schedules from seed {seeds[0]}, {len(broken)} with violations {broken or ''}; "
        f"{statistics.median(seconds):.1f} s each (median), {max(seconds):.1f} s at most, {taken_s:.0f} s in all"
    )


def prove(names: Sequence[str], first: int, jobs: int, most_seeds: int = MOST_SEEDS) -> int:
    """Take each protection away and run schedules until one breaks a promise; returns 1 if one is not missed.

    The same schedule with the protection must keep every promise: otherwise it shows something else.
    """
    began, unnoticed = time.monotonic(), []
    with Warmth() as warmth:
        lane = _Lane(warmth.address)
        expected = lane.expectations()
        lane.close()
        for name in names:
            result, tried = _first_violation(name, first, jobs, most_seeds, warmth.address, expected)
            what = f"{name:16} without {PROTECTIONS[name].what}:"
            if result is None:
                unnoticed.append(name)
                print(f"{what} NOT NOTICED in {tried} schedules", flush=True)
                continue
            promises = ", ".join(dict.fromkeys(result.promises))
            print(f"{what} seed {result.seed} (schedule {tried} of its kind): {promises}", flush=True)
    print(f"{len(names) - len(unnoticed)} of {len(names)} noticed, {time.monotonic() - began:.0f} s in all")
    return 1 if unnoticed else 0


def _first_violation(
    name: str, first: int, jobs: int, most_seeds: int, warmth: str, expected: dict[int, Expected]
) -> tuple[SeedResult | None, int]:
    """Return the first result that breaks one of the promises that this protection is for, and how many were tried."""
    protection, tried = PROTECTIONS[name], 0
    seeds = itertools.islice(_with_faults(itertools.count(first), protection.faults), most_seeds)
    lanes = [_Lane(warmth, name) for _ in range(jobs)]  # new ones: what was taken away in a process stays away
    try:
        for result in _share_out(seeds, lanes, expected, is_quiet=True):
            tried += 1
            if result.patch_errors:
                print(
                    f"{name}: not counted, the patch failed in seed {result.seed}: {result.patch_errors[0]}", flush=True
                )
                continue
            if protection.promises & set(result.promises):
                if _is_kept_with_all(result.seed, warmth, expected):
                    return result, tried
                print(f"{name}: seed {result.seed} breaks a promise with every protection too", flush=True)
    finally:
        for lane in lanes:
            lane.close(is_patient=False)
    return None, tried


def _is_kept_with_all(seed: int, warmth: str, expected: dict[int, Expected]) -> bool:
    """Return whether a schedule keeps every promise while nothing is taken away."""
    lane = _Lane(warmth)
    try:
        return not any(result.promises for result in _share_out([seed], [lane], expected, is_quiet=True))
    finally:
        lane.close()


def _with_faults(seeds: Iterable[int], kinds: frozenset[str]) -> Iterator[int]:
    for seed in seeds:
        if not kinds or kinds & _kinds_of(schedule_of(seed)):
            yield seed


def _kinds_of(schedule: Schedule) -> set[str]:
    return {*(fault.kind for fault in schedule.heavy), *(fault.kind for fault in schedule.network)}


def _share_out(
    seeds: Iterable[int], lanes: list[_Lane], expected: dict[int, Expected], is_quiet: bool = False
) -> Iterator[SeedResult]:
    """Give every free lane the next seed until there is none. Yields results as they come."""
    waiting = iter(seeds)
    busy: dict[Connection, tuple[_Lane, int]] = {}
    idle = list(lanes)
    while True:
        while idle and (seed := next(waiting, None)) is not None:
            lane = idle.pop()
            lane.connection.send((seed, expected))
            busy[lane.connection] = (lane, seed)
        if not busy:
            return
        for ready in multiprocessing.connection.wait(list(busy)):
            assert isinstance(ready, Connection)
            lane, seed = busy.pop(ready)
            result = lane.receive(seed)
            idle.append(lane)
            if not is_quiet and (result.promises or sys.stdout.isatty()):
                print(result.text, flush=True)
            yield result


class _Lane:
    """A process that runs one schedule after the other, all without the same protection or with every one."""

    def __init__(self, warmth: str, without: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, warmth, without))
        self._process.start()
        theirs.close()

    def expectations(self) -> dict[int, Expected]:
        self.connection.send(None)
        expected: dict[int, Expected] = self.connection.recv()
        return expected

    def receive(self, seed: int) -> SeedResult:
        try:
            result: SeedResult = self.connection.recv()
            return result
        except EOFError:
            raise AssertionError(f"the process that ran seed {seed} is gone") from None

    def close(self, is_patient: bool = True) -> None:
        """End it: after the schedule that it runs, or at once."""
        self.connection.close()
        if not is_patient:
            self._process.terminate()
        self._process.join(60)  # it puts its PostgreSQL away, which takes long on a busy machine
        if self._process.is_alive():
            self._process.kill()


def _work(connection: Connection, warmth: str, without: str) -> None:
    # An exception instead of the end: a PostgreSQL, a mounted disk and folders are put away on the way out.
    signal.signal(signal.SIGTERM, _leave)
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
            connection.send(_result(bench.run(schedule_of(seed), expected, without)))
    finally:
        bench.close()


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _result(outcome: Outcome) -> SeedResult:
    text = outcome.report()
    if outcome.violations:
        text = f"{outcome.schedule}\n{outcome.timeline}\n{text}"
    return SeedResult(
        seed=outcome.schedule.seed,
        promises=[violation.promise for violation in outcome.violations],
        patch_errors=[call.error for call in outcome.history.calls if call.error and call.error.startswith(_OURS)],
        faults=dict(Counter(fault.what for fault in outcome.history.faults)),
        seconds=outcome.seconds,
        stall_cpu_s=max((stall.cpu_s for stall in outcome.history.stalls), default=0.0),
        text=text,
    )
