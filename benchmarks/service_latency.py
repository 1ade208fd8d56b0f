"""How long small operations take through the service, journal included, and how soon it is ready.

    python -m benchmarks.service_latency          (part of `make bench`; writes benchmarks/results/service_latency.md)
    python -m benchmarks.service_latency --before FOLDER

The tiny model, our client, one call at a time: what is measured is everything but maths. `--before` names an older
checkout, with its kernels built: its service runs at the same time, the calls go to both in turn, and the page
`service_before.md` has the ratios.
"""

from __future__ import annotations

import argparse
import datetime as dt
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import tinkex
from benchmarks.client_cost import commit, cpu_model
from tests.integration.service.live import LiveServer

ROUNDS = 5
CALLS = 60
SAMPLES = 2000
RESULTS = Path(__file__).parent / "results"
BACKWARD, STEP, SAMPLE = "forward_backward 1×32", "optim_step", "sample 8 + 8"
MANY = f"{SAMPLES:,} concurrent samples 8 + 4"
PROMPT = tinkex.ModelInput.from_ints(list(range(20, 28)))
DATUM = tinkex.Datum(
    tinkex.ModelInput.from_ints(list(range(20, 52))), {"target_tokens": list(range(21, 53)), "weights": [1.0] * 32}
)
Times = dict[str, list[float]]


class Caller:
    """A client of one service that times its calls, in milliseconds."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        service = stack.enter_context(tinkex.ServiceClient(base_url=url, api_key="tml-bench"))
        self._training = service.create_lora_training_client(base_model="tinkex/tiny", rank=8)
        self._sampler = service.create_sampling_client(base_model="tinkex/tiny")
        self.times: Times = {BACKWARD: [], STEP: [], SAMPLE: [], MANY: []}

    def one_of_each(self) -> None:
        training, params = self._training, tinkex.SamplingParams(max_tokens=8, stop=[])
        self._time(BACKWARD, lambda: training.forward_backward([DATUM], "cross_entropy").result())
        self._time(STEP, lambda: training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result())
        self._time(SAMPLE, lambda: self._sampler.sample(PROMPT, 1, params).result())

    def many_samples(self) -> None:
        params = tinkex.SamplingParams(max_tokens=4, stop=[])

        def samples() -> None:
            for future in [self._sampler.sample(PROMPT, 1, params) for _ in range(SAMPLES)]:
                future.result()

        self._time(MANY, samples)

    def _time(self, kind: str, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        self.times[kind].append((time.perf_counter() - started) * 1e3)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="an older checkout of tinkex to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how many pairs of services (default %(default)s)")
    chosen = parser.parse_args(arguments)
    sources = [None] if chosen.before is None else [None, chosen.before.resolve() / "src"]
    ready: list[float] = []
    rounds: list[list[Times]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(chosen.rounds):
            print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr, flush=True)
            rounds.append(one_round(Path(folder) / str(number), sources, ready))
    if chosen.before is None:
        page, text = "service_latency.md", report(ready, [times for (times,) in rounds])
    else:
        page, text = "service_before.md", compare(rounds, commit(), commit(chosen.before))
    (RESULTS / page).write_text(text)
    print(text)
    return 0


def one_round(folder: Path, sources: list[Path | None], ready: list[float]) -> list[Times]:
    """Start a service of each checkout, send calls to them in turn, and return the times of each."""
    folder.mkdir()
    with ExitStack() as stack:
        callers = []
        for number, source in enumerate(sources):
            started = time.perf_counter()
            server = stack.enter_context(LiveServer(folder / f"data{number}", source=source))
            if source is None:
                ready.append(time.perf_counter() - started)
            callers.append(Caller(server.url, stack))
        for call in range(CALLS):
            for caller in callers[:: 1 if call % 2 else -1]:
                caller.one_of_each()
        if len(callers) > 1:
            for caller in [*callers, *callers[::-1]]:
                caller.many_samples()
        return [caller.times for caller in callers]


def report(ready: list[float], rounds: list[Times]) -> str:
    lines = [
        "# How long small operations take",
        "",
        f"Written by `python -m benchmarks.service_latency` on {machine(commit())}",
        f"Tiny model, SQLite, our client, one call at a time, {len(rounds)} servers, {CALLS} calls of each kind "
        "on each. Median of the rounds (smallest … largest).",
        "",
        "| what | p50 | p95 |",
        "|---|---|---|",
    ]
    for kind in (STEP, BACKWARD, SAMPLE):
        middles = [statistics.median(times[kind]) for times in rounds]
        highs = [sorted(times[kind])[int(0.95 * CALLS)] for times in rounds]
        lines.append(f"| {kind} | {_spread(middles, 'ms')} | {_spread(highs, 'ms')} |")
    lines += ["", f"From `tinkex serve` to healthz 200: {_spread(ready, 's')}.", ""]
    return "\n".join(lines)


def compare(rounds: list[list[Times]], now: str, before: str) -> str:
    lines = [
        "# The service beside an older checkout",
        "",
        f"Written by `python -m benchmarks.service_latency --before FOLDER` on {machine(now)}",
        f"Before is commit {before}. Both services run at the same time, calls go to them in turn; tiny model, "
        f"SQLite, our client, {len(rounds)} pairs of services, {CALLS} calls of each kind. Median of the rounds "
        "(smallest … largest).",
        "",
        "| what, p50 | now | before | now ÷ before |",
        "|---|---|---|---|",
    ]
    for kind in (STEP, BACKWARD, SAMPLE, MANY):
        new, old = ([statistics.median(pair[side][kind]) for pair in rounds] for side in (0, 1))
        ratios = [fresh / aged for fresh, aged in zip(new, old, strict=True)]
        lines.append(f"| {kind} | {_spread(new, 'ms')} | {_spread(old, 'ms')} | {_spread(ratios, '', 3)} |")
    return "\n".join([*lines, ""])


def machine(version: str) -> str:
    return f"{dt.date.today()}: 2 cores, {cpu_model()}, Python {platform.python_version()}, commit {version}."


def _spread(values: list[float], unit: str, digits: int = 1) -> str:
    middle = f"{statistics.median(values):.{digits}f} {unit}".rstrip()
    return f"{middle} ({min(values):.{digits}f} … {max(values):.{digits}f})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
