"""Many honest clients on one service, first alone, then beside two hostile ones: who notices?

    python -m benchmarks.hostile_load --clients 512 --minutes 10 --hostile 2
    python -m benchmarks.hostile_load --clients 32 --minutes 0.7 --write ''          (a short try; writes no file)

A real `tinkex serve` with keys, on the tiny model and SQLite. Honest clients are objects of our SDK in two processes;
each trains or samples, thinks for a while, and does so again. The phase without hostile clients is half as long as the
one with them. It stops by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import multiprocessing
import os
import platform
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import tinkex
from benchmarks.client_cost import commit, cpu_model
from benchmarks.hostile_clients import HostileClient
from benchmarks.memory_curve import Reading, memory_lines
from tests.integration.service.live import LiveServer

RESULTS = Path(__file__).parent / "results" / "hostile_load.md"
DRIVERS = 2
TENANTS = 16
"""Keys that the honest clients share."""
THINK_S = 4.0
"""On average, between two rounds of a client: 512 clients then ask for about as much as two cores can do."""
WARM_UP = 0.25
"""The share of the first phase that is not counted: sessions and runs are created, kernels are warmed up."""
GRACE_S = 30.0
"""How long calls may take after the end before they count as errors."""
BEAT_S = 0.01
"""How often the service's watchdog looks at its loop."""
Times = dict[str, list[tuple[float, float]]]
"""Kind of call → when each began (monotonic, s), and how long it took (s)."""


@dataclass
class Driven:
    """What the honest clients of one process saw."""

    times: Times = field(default_factory=dict)
    errors: list[tuple[float, str]] = field(default_factory=list)
    """When, and what."""
    too_many: list[float] = field(default_factory=list)
    """When a request got 429. The SDK waits and asks again."""


def key_of(number: int) -> str:
    return f"tml-honest-{number % TENANTS:02d}-0123456789"


def hostile_key(number: int) -> str:
    return f"tml-hostile-{number}-0123456789"


# ── The honest clients


def drive(url: str, numbers: list[int], end_at: float, results: Connection) -> None:
    """Run clients until `end_at` (monotonic), then send a `Driven`. Target of a process."""
    driven = Driven()

    def note(event: Any) -> None:
        if event.status == 429:
            driven.too_many.append(time.monotonic())

    tinkex.on("request", note)
    asyncio.run(_drive_all(url, numbers, end_at, driven))
    results.send(driven)


async def _drive_all(url: str, numbers: list[int], end_at: float, driven: Driven) -> None:
    tasks = [asyncio.create_task(_drive_one(url, number, end_at, driven)) for number in numbers]
    _, late = await asyncio.wait(tasks, timeout=end_at + GRACE_S - time.monotonic())
    for task in late:
        task.cancel()
    await asyncio.wait(tasks, timeout=GRACE_S)


async def _drive_one(url: str, number: int, end_at: float, driven: Driven) -> None:
    """Train, if the number is even, or sample, until the end."""
    dice = random.Random(number)
    await asyncio.sleep(dice.random() * THINK_S * 2)
    service = tinkex.ServiceClient(base_url=url, api_key=key_of(number), timeout_s=60.0)
    training: tinkex.TrainingClient | None = None
    sampler: tinkex.SamplingClient | None = None
    try:
        while (began := time.monotonic()) < end_at:
            try:
                if number % 2 == 0:
                    training = training or await _timed(
                        driven, "create", service.create_lora_training_client_async("tinkex/tiny", rank=4, seed=number)
                    )
                    await _train(training, dice, driven)
                else:
                    sampler = sampler or await _timed(
                        driven, "create sampler", service.create_sampling_client_async(base_model="tinkex/tiny")
                    )
                    await _sample(sampler, dice, driven)
            except tinkex.TinkexError as error:
                driven.errors.append((began, f"{type(error).__name__}: {error}"[:300]))
            await asyncio.sleep(dice.expovariate(1 / THINK_S))
    finally:
        try:
            await service.close()
        except tinkex.TinkexError as error:
            driven.errors.append((time.monotonic(), f"close: {type(error).__name__}: {error}"[:300]))


async def _timed(driven: Driven, kind: str, work: Any) -> Any:
    began = time.monotonic()
    try:
        return await work
    except asyncio.CancelledError:
        driven.errors.append((began, f"NoResult: {kind} waited for {time.monotonic() - began:.0f} s, until the end"))
        raise
    finally:
        # Also of a call that failed or was waiting at the end: without them, the slowest calls would be left out.
        driven.times.setdefault(kind, []).append((began, time.monotonic() - began))


async def _train(training: tinkex.TrainingClient, dice: random.Random, driven: Driven) -> None:
    row = [dice.randrange(5, 250) for _ in range(33)]
    datum = tinkex.Datum(
        tinkex.ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
    )
    await _timed(driven, "forward_backward", training.forward_backward([datum], "cross_entropy"))
    await _timed(driven, "optim_step", training.optim_step(tinkex.AdamParams(learning_rate=1e-3)))


async def _sample(sampler: tinkex.SamplingClient, dice: random.Random, driven: Driven) -> None:
    prompt = tinkex.ModelInput.from_ints([dice.randrange(5, 250) for _ in range(8)])
    await _timed(driven, "sample", sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=8, stop=[])))


# ── The service, seen from outside


class Stalls(NamedTuple):
    """How often the service's loop stood still: code computed on it, or it waited (mostly for a core)."""

    by_code: int = 0
    by_waiting: int = 0
    longest_code_s: float = 0.0
    longest_waiting_s: float = 0.0


class Gauges:
    """Reads the memory of server and engine every second, and the metrics when it is asked."""

    def __init__(self, server: LiveServer) -> None:
        self._server, self._is_over = server, threading.Event()
        self.readings: list[Reading] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._is_over.wait(1.0):
            process = self._server.process
            if process is not None:
                pids = (process.pid, self._server.engine_pid())
                self.readings.append(Reading(time.monotonic(), *map(_memory_mb, pids)))

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(5)

    def stalls(self) -> Stalls:
        """Return how often the loop was blocked for 50 ms or more since the start, by cause."""
        request = urllib.request.Request(f"{self._server.url}/metrics", headers={"x-api-key": key_of(0)})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                lines = response.read().decode().splitlines()
        except OSError:
            return Stalls()
        values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("tinkex_loop"))
        counts = [float(values[f'tinkex_loop_stalls_total{{cause="{cause}"}}']) for cause in ("code", "waiting")]
        longest = [
            float(values[f'tinkex_loop_longest_stall_seconds{{cause="{cause}"}}']) for cause in ("code", "waiting")
        ]
        return Stalls(int(counts[0]), int(counts[1]), longest[0], longest[1])


def _memory_mb(pid: int | None) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("VmRSS")), 0.0)


# ── One run


@dataclass
class Phase:
    """A stretch of time with what was seen in it."""

    name: str
    began: float
    ended: float
    before: Stalls
    after: Stalls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the phase with hostile clients")
    parser.add_argument("--hostile", type=int, default=2)
    parser.add_argument("--write", default=str(RESULTS), help="the file for the report; empty: none")
    args = parser.parse_args()
    keys = [key_of(number) for number in range(TENANTS)] + [hostile_key(number) for number in range(args.hostile)]
    with tempfile.TemporaryDirectory(prefix="tinkex-load-") as folder:
        server = LiveServer(Path(folder) / "data", *(word for key in keys for word in ("--api-key", key)))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ended early, it takes the server with it
        with server:
            text = _run(server, args.clients, args.minutes * 60, args.hostile)
            print(text)
            if args.write:
                Path(args.write).write_text(text)
    return 0


def _run(server: LiveServer, clients: int, seconds: float, hostile: int) -> str:
    calm_s = seconds / 2
    gauges, began = Gauges(server), time.monotonic()
    calm_from, calm_until, end_at = began + calm_s * WARM_UP, began + calm_s, began + calm_s + seconds
    drivers = _start_drivers(server.url, clients, end_at)
    _say("honest clients alone")
    _sleep_until(calm_from)
    stalls = gauges.stalls()
    _sleep_until(calm_until)
    after_calm = gauges.stalls()
    phases = [Phase("alone", calm_from, calm_until, stalls, after_calm)]
    _say(f"and {hostile} hostile ones")
    attackers = [HostileClient(server.url, hostile_key(number)) for number in range(hostile)]
    for attacker in attackers:
        attacker.start()
    _sleep_until(end_at)
    after = gauges.stalls()
    phases.append(Phase("with hostile clients", calm_until, end_at, after_calm, after))
    for attacker in attackers:
        attacker.stop()
    _say("collecting")
    driven, missing = _collect(drivers)
    gauges.stop()
    returned: Counter[str] = sum((attacker.statuses for attacker in attackers), Counter())
    return report(clients, hostile, phases, driven, missing, gauges.readings, returned)


def _start_drivers(url: str, clients: int, end_at: float) -> list[tuple[Any, Connection]]:
    context, drivers = multiprocessing.get_context("spawn"), []
    for number in range(DRIVERS):
        ours, theirs = context.Pipe()
        numbers = list(range(number * 2, clients, DRIVERS * 2)) + list(range(number * 2 + 1, clients, DRIVERS * 2))
        process = context.Process(target=drive, args=(url, numbers, end_at, theirs))
        process.start()
        drivers.append((process, ours))
    return drivers


def _collect(drivers: list[tuple[Any, Connection]]) -> tuple[Driven, int]:
    """Return what all drivers saw, and how many of them did not report."""
    everything, missing = Driven(), 0
    for process, connection in drivers:
        if connection.poll(GRACE_S * 3):
            driven: Driven = connection.recv()
            for kind, rows in driven.times.items():
                everything.times.setdefault(kind, []).extend(rows)
            everything.errors += driven.errors
            everything.too_many += driven.too_many
        else:
            missing += 1
        process.join(10)
        if process.is_alive():
            process.kill()
    return everything, missing


def _sleep_until(moment: float) -> None:
    threading.Event().wait(max(moment - time.monotonic(), 0.0))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ── The report


def report(
    clients: int,
    hostile: int,
    phases: list[Phase],
    driven: Driven,
    missing: int,
    readings: list[Reading],
    returned: Counter[str],
) -> str:
    beside = phases[1]
    lines = [
        "# Honest clients beside hostile ones",
        "",
        f"Written by `python -m benchmarks.hostile_load --clients {clients} --minutes "
        f"{(beside.ended - beside.began) / 60:g} --hostile {hostile}` on {dt.date.today()}: {os.cpu_count()} cores, "
        f"{cpu_model()}, Python {platform.python_version()}, torch {version('torch')}, commit {commit()}. Load of the "
        f"machine at the end: {os.getloadavg()[0]:.1f}.",
        f"Tiny model, SQLite, {clients} objects of our SDK under {TENANTS} keys in {DRIVERS} processes; a hostile "
        "client sends bombs, slow bodies, unread streams and huge samples, all at once.",
        "",
        "| call | alone: calls, p50, p99 | with hostile clients: calls, p50, p99 | p99, ratio (aim: below 3) |",
        "|---|---|---|---|",
    ]
    for kind, rows in sorted(driven.times.items()):
        before, after = (_within(rows, phase) for phase in phases)
        ratio = f"{_quantile(after, 0.99) / _quantile(before, 0.99):.2f}" if before and after else "–"
        lines.append(f"| {kind} | {_cell(before)} | {_cell(after)} | {ratio} |")
    lines += ["", "| | alone | with hostile clients |", "|---|---|---|"]
    for name, cells in _facts(driven, phases).items():
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *memory_lines(readings, {phase.name: (phase.began, phase.ended) for phase in phases}), ""]
    if missing:
        lines += [f"**{missing} of {DRIVERS} drivers did not report.**", ""]
    kinds = Counter(text.split(":")[0] for at, text in driven.errors)
    if kinds:
        lines += [f"Errors of honest clients: {dict(kinds)}. The first: `{driven.errors[0][1]}`", ""]
    lines += ["What the hostile clients got:", ""]
    lines += [f"* {name}: {count}" for name, count in sorted(returned.items())]
    return "\n".join(lines) + "\n"


def _facts(driven: Driven, phases: list[Phase]) -> dict[str, list[str]]:
    facts: dict[str, list[str]] = {}
    for phase in phases:
        seconds = phase.ended - phase.began
        calls = sum(len(_within(rows, phase)) for rows in driven.times.values())
        errors = sum(phase.began <= at < phase.ended for at, _ in driven.errors)  # failed calls have a time too
        too_many = sum(phase.began <= at < phase.ended for at in driven.too_many)
        code, waiting = (later - earlier for earlier, later in list(zip(phase.before, phase.after, strict=True))[:2])
        for name, cell in {
            "calls per second": f"{calls / seconds:.1f}",
            "errors (aim: 0)": f"{errors} of {calls}",
            "429s, obeyed": str(too_many),
            "stalls of the server's loop by code, 50 ms or more; share of its beats (aim: below 0.1 %)": (
                f"{code:.0f}, {code * BEAT_S / seconds:.3%}"
            ),
            "stalls in which it waited, mostly for a core": f"{waiting:.0f}, {waiting * BEAT_S / seconds:.3%}",
            "longest since the start, by code and waiting": (
                f"{phase.after.longest_code_s * 1e3:.0f} ms, {phase.after.longest_waiting_s * 1e3:.0f} ms"
            ),
        }.items():
            facts.setdefault(name, []).append(cell)
    return facts


def _within(rows: list[tuple[float, float]], phase: Phase) -> list[float]:
    return sorted(seconds for at, seconds in rows if phase.began <= at < phase.ended)


def _quantile(seconds: list[float], share: float) -> float:
    return seconds[min(int(len(seconds) * share), len(seconds) - 1)]


def _cell(seconds: list[float]) -> str:
    if not seconds:
        return "0"
    return f"{len(seconds)}, {_quantile(seconds, 0.5) * 1e3:.0f} ms, {_quantile(seconds, 0.99) * 1e3:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
