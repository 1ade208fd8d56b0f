"""Runs many schedules, several at a time, each lane in a process of its own."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType

from tests.faults.broken import PROTECTIONS, Protection
from tests.faults.checker import Expected
from tests.faults.harness import AnySchedule, Bench, Outcome
from tests.faults.history import Resumption
from tests.faults.schedule import Schedule, schedule_of
from tests.faults.warm import Warmth

_TELLS_EACH = "TESTS_TELL_EACH_SEED"
"""In the environment: print a line for each schedule, also where stdout is a file."""
_OURS = ("TypeError", "AttributeError", "NameError")
MOST_SEEDS = 100
"""How many schedules may try to show what a missing protection breaks."""
MOST_S = 900.0
"""How long a schedule may take: three times the longest on a busy machine. One that does not end counts as broken."""
PROGRESS_EVERY = 10
"""Schedules after which a long run says how far it is."""


def kinds_of(schedule: AnySchedule) -> set[str]:
    """Return the kinds of faults of a schedule for one server."""
    assert isinstance(schedule, Schedule)
    return {*(fault.kind for fault in schedule.heavy), *(fault.kind for fault in schedule.network)}


@dataclass(frozen=True)
class Rig:
    """What is run: by default one server, and the schedules for it. Functions of a module, which a lane imports."""

    bench: Callable[[str], Bench] = Bench
    schedule_of: Callable[[int], AnySchedule] = schedule_of
    kinds_of: Callable[[AnySchedule], set[str]] = kinds_of
    is_cluster: bool = False
    program: str = Bench.program

    def command(self, seed: int) -> str:
        """Return what runs a schedule again and prints its timeline."""
        return f"python -m {self.program} --seed {seed}"

    def faults_for(self, protection: Protection) -> frozenset[str]:
        return protection.cluster_faults if self.is_cluster else protection.faults


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
    resumptions: list[Resumption]
    counts: dict[str, int]


def run_range(seeds: Sequence[int], jobs: int, rig: Rig | None = None) -> int:
    """Run every seed and print the report of each that broke a promise; returns 1 if there was one."""
    began, rig = time.monotonic(), rig or Rig()
    with Warmth() as warmth:
        lanes = [_Lane(warmth.address, rig) for _ in range(min(jobs, len(seeds)))]
        try:
            wanted = {number for seed in seeds for number in rig.schedule_of(seed).programs.values()}
            expected = lanes[0].expectations(wanted)
            results = list[SeedResult]()
            for result in _share_out(seeds, lanes, expected):
                results.append(result)
                if len(results) % PROGRESS_EVERY == 0:
                    print(_progress(len(seeds), results, time.monotonic() - began), flush=True)
        finally:
            for lane in lanes:
                lane.close()
    broken = sorted(result.seed for result in results if result.promises)
    print(_summary(seeds, results, broken, time.monotonic() - began))
    for seed in broken:
        print(f"to see seed {seed} again: {rig.command(seed)}")
    return 1 if broken else 0


def _progress(count: int, results: list[SeedResult], taken_s: float) -> str:
    done, broken = len(results), sum(bool(result.promises) for result in results)
    left_s = taken_s / done * (count - done)
    return f"{done} of {count} schedules, {broken} with violations; {taken_s:.0f} s, about {left_s:.0f} s left"


def tell(outcome: Outcome, *, has_log: bool) -> int:
    """Print what happened in one schedule, and return the exit code."""
    print(outcome.timeline)
    if has_log:
        print(outcome.log)
    print(outcome.report())
    return 1 if outcome.violations else 0


def _summary(seeds: Sequence[int], results: list[SeedResult], broken: list[int], taken_s: float) -> str:
    faults = Counter[str]()
    for result in results:
        faults.update(result.faults)
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items()))
    seconds, stalls_s = [result.seconds for result in results], [result.stall_cpu_s for result in results]
    return (
        f"{sum(faults.values())} faults: {kinds}\n"
        f"{_resumptions(results)}"
        f"longest time that a callback computed on a loop: {max(stalls_s) * 1e3:.0f} ms\n"
        f"{len(results)} schedules from seed {seeds[0]}, {len(broken)} with violations {broken or ''}; "
        f"{statistics.median(seconds):.1f} s each (median), {max(seconds):.1f} s at most, {taken_s:.0f} s in all"
    )


def _resumptions(results: list[SeedResult]) -> str:
    """Return a line for each kind of fault, with how long tenants waited, and what the service counted."""
    waits_s: dict[str, list[float]] = {}
    counts = Counter[str]()
    for result in results:
        counts.update(result.counts)
        for resumption in result.resumptions:
            waits_s.setdefault(resumption.what, []).append(resumption.seconds)
    width = max(map(len, waits_s), default=0)
    lines = [
        f"  {kind:{width}} {len(found):4} times, on again after {statistics.median(found):5.1f} s (median), "
        f"{max(found):5.1f} s at most"
        for kind, found in sorted(waits_s.items())
    ]
    lines += [f"  {name}: {count}" for name, count in sorted(counts.items())]
    return "".join(f"{line}\n" for line in lines)


def prove(names: Sequence[str], first: int, jobs: int, most_seeds: int = MOST_SEEDS, rig: Rig | None = None) -> int:
    """Take each protection away and run schedules until one breaks a promise; returns 1 if one is not missed.

    The same schedule with the protection must keep every promise: otherwise it shows something else.
    """
    began, unnoticed, rig = time.monotonic(), list[str](), rig or Rig()
    with Warmth() as warmth:
        lane = _Lane(warmth.address, rig)
        expected = lane.expectations()
        lane.close()
        for name in names:
            result, tried = _first_violation(name, first, jobs, most_seeds, warmth.address, expected, rig)
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
    name: str, first: int, jobs: int, most_seeds: int, warmth: str, expected: dict[int, Expected], rig: Rig
) -> tuple[SeedResult | None, int]:
    """Return the first result that breaks one of the promises that this protection is for, and how many were tried."""
    protection, tried = PROTECTIONS[name], 0
    seeds = itertools.islice(_with_faults(itertools.count(first), rig.faults_for(protection), rig), most_seeds)
    lanes = [_Lane(warmth, rig, name) for _ in range(jobs)]  # new ones: what was taken away in a process stays away
    try:
        for result in _share_out(seeds, lanes, expected, is_quiet=True):
            tried += 1
            if result.patch_errors:
                print(
                    f"{name}: not counted, the patch failed in seed {result.seed}: {result.patch_errors[0]}", flush=True
                )
                continue
            if protection.promises & set(result.promises):
                if _is_kept_with_all(result.seed, warmth, expected, rig):
                    return result, tried
                print(f"{name}: seed {result.seed} breaks a promise with every protection too", flush=True)
    finally:
        for lane in lanes:
            lane.close(is_patient=False)
    return None, tried


def _is_kept_with_all(seed: int, warmth: str, expected: dict[int, Expected], rig: Rig) -> bool:
    """Return whether a schedule keeps every promise while nothing is taken away."""
    lanes = [_Lane(warmth, rig)]
    try:
        return not any(result.promises for result in _share_out([seed], lanes, expected, is_quiet=True))
    finally:
        lanes[0].close()


def _with_faults(seeds: Iterable[int], kinds: frozenset[str], rig: Rig) -> Iterator[int]:
    for seed in seeds:
        if not kinds or kinds & rig.kinds_of(rig.schedule_of(seed)):
            yield seed


def _share_out(
    seeds: Iterable[int], lanes: list[_Lane], expected: dict[int, Expected], is_quiet: bool = False
) -> Iterator[SeedResult]:
    """Give every free lane the next seed until there is none. Yields results as they come.

    A lane that ends, or whose schedule does not, is replaced in `lanes`.
    """
    waiting = iter(seeds)
    busy: dict[Connection, tuple[_Lane, int, float]] = {}
    idle = list(lanes)
    while True:
        while idle and (seed := next(waiting, None)) is not None:
            lane = idle.pop()
            lane.connection.send((seed, expected))
            busy[lane.connection] = (lane, seed, time.monotonic())
        if not busy:
            return
        ready = multiprocessing.connection.wait(list(busy), timeout=1.0)
        overdue = [end for end, (_, _, began) in busy.items() if time.monotonic() - began > MOST_S]
        for end in {*(end for end in ready if isinstance(end, Connection)), *overdue}:
            lane, seed, began = busy.pop(end)
            result = lane.receive() if end in ready else None
            if result is None:
                reason = f"did not end within {MOST_S:.0f} s" if end in overdue else "ended the process that ran it"
                result = _lost(seed, reason, time.monotonic() - began)
                lanes[lanes.index(lane)] = lane = lane.replaced()
            idle.append(lane)
            if not is_quiet and (result.promises or sys.stdout.isatty()):
                print(result.text, flush=True)
            elif not is_quiet and _TELLS_EACH in os.environ:
                print(f"seed {seed} kept every promise ({result.seconds:.1f} s)", flush=True)
            yield result


def _lost(seed: int, reason: str, seconds: float) -> SeedResult:
    """Return the result of a schedule of which nothing is known."""
    return SeedResult(
        seed=seed,
        promises=["no crash"],
        patch_errors=[],
        faults={},
        seconds=seconds,
        stall_cpu_s=0.0,
        text=f"seed {seed}: the schedule {reason}",
        resumptions=[],
        counts={},
    )


class _Lane:
    """A process that runs one schedule after the other, all without the same protection or with every one."""

    def __init__(self, warmth: str, rig: Rig, without: str = "") -> None:
        self._warmth, self._rig, self._without = warmth, rig, without
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, warmth, rig, without))
        self._process.start()
        theirs.close()

    def expectations(self, wanted: set[int] | None = None) -> dict[int, Expected]:
        """Run programs undisturbed: those that are wanted, and some others with them, or all."""
        self.connection.send(wanted)
        expected: dict[int, Expected] = self.connection.recv()
        return expected

    def receive(self) -> SeedResult | None:
        """Return the result of the schedule that it has run; None if its process is gone."""
        try:
            result: SeedResult = self.connection.recv()
            return result
        except (EOFError, ConnectionResetError):
            return None

    def replaced(self) -> _Lane:
        """End it at once, and return another one for the same work."""
        self.close(is_patient=False)
        return _Lane(self._warmth, self._rig, self._without)

    def close(self, is_patient: bool = True) -> None:
        """End it: after the schedule that it runs, or at once."""
        self.connection.close()
        if not is_patient:
            self._process.terminate()
        self._process.join(60)  # it puts its PostgreSQL away, which takes long on a busy machine
        if self._process.is_alive():
            self._process.kill()


def _work(connection: Connection, warmth: str, rig: Rig, without: str) -> None:
    # An exception instead of the end: a PostgreSQL, a mounted disk and folders are put away on the way out.
    signal.signal(signal.SIGTERM, _leave)
    bench = rig.bench(warmth)
    try:
        while True:
            try:
                task = connection.recv()
            except EOFError:
                return
            if task is None or isinstance(task, set):
                connection.send(bench.expectations(task))
                continue
            seed, expected = task
            connection.send(_result(bench.run(rig.schedule_of(seed), expected, without)))
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
        resumptions=outcome.history.resumptions,
        counts=outcome.history.counts,
    )
