"""What a save costs: another tenant's steps beside it, the save alone, and the step after it.

    python -m benchmarks.saving --before FOLDER     (writes benchmarks/results/saving.md)

SmolLM2-135M, an adapter of rank 128 on all layers, saved with its optimizer state (545 MB). The other tenant trains an
adapter of rank 8: forward_backward 1×32 and optim_step, in turn, each awaited. `--before` is an older checkout: a
service of each runs on this machine, and every round does the same with both, one after the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tinkex
from benchmarks.engine_memory import OPTIMIZER, WAIT_S, Shape, say
from benchmarks.engine_training import MODEL
from benchmarks.side_by_side import RESULTS, surroundings
from tests.integration.service.live import LiveServer
from tinkex.client.training import TrainingClient

RANK = 128
KEYS = ("tml-alice-0123456789", "tml-bob-0123456789ab")
ALONE = 12
"""Steps of the other tenant before every save: they say how long one takes without it."""


@dataclass
class Side:
    """One service and what was measured on it, in milliseconds. Every list has an entry per round."""

    name: str
    saving: TrainingClient
    other: TrainingClient
    shape: Shape
    times: dict[str, list[float]] = field(default_factory=dict)
    saves: int = 0

    def note(self, what: str, milliseconds: float) -> None:
        self.times.setdefault(what, []).append(milliseconds)
        say(f"{self.name}: {what}: {milliseconds:.0f} ms")

    def passes(self, trainer: TrainingClient) -> float:
        return timed_ms(lambda: trainer.forward_backward(self.shape.data(1, 32), "cross_entropy").result(WAIT_S))

    def step(self, trainer: TrainingClient) -> tuple[float, float]:
        return self.passes(trainer), timed_ms(lambda: trainer.optim_step(OPTIMIZER).result(WAIT_S))

    def save(self, with_optimizer: bool = True) -> tinkex.APIFuture[object]:
        self.saves += 1
        name = f"save-{self.saves}"
        save = self.saving.save_state if with_optimizer else self.saving.save_weights_for_sampler
        return save(name)  # type: ignore[return-value]

    def round(self) -> None:
        """Do everything once."""
        self.beside("save with optimizer")
        self.beside("save for a sampler", with_optimizer=False)
        self.note("save alone", timed_ms(lambda: self.save().result(WAIT_S)))
        began = time.perf_counter()
        saved = self.save()
        self.passes(self.saving)
        self.note("save and the run's next forward_backward", (time.perf_counter() - began) * 1e3)
        saved.result(0)
        self.saving.optim_step(OPTIMIZER).result(WAIT_S)

    def beside(self, what: str, with_optimizer: bool = True) -> None:
        """Note how much longer than without a save the slowest steps of the other tenant take beside one."""
        alone = [self.step(self.other) for _ in range(ALONE)]
        began = time.perf_counter()
        saved = self.save(with_optimizer)
        ended: list[float] = []
        saved.add_done_callback(lambda _: ended.append(time.perf_counter()))
        steps = []
        while not saved.done():
            steps.append(self.step(self.other))
        saved.result(0)
        for at, kind in enumerate(("forward_backward", "optim_step")):
            usual = statistics.median(step[at] for step in alone)
            self.note(f"{kind} alone", usual)
            self.note(f"{kind} alone, slowest", max(step[at] for step in alone) - usual)
            self.note(f"{kind} beside a {what}, slowest", max(step[at] for step in steps) - usual)
            self.note(f"{kind} beside a {what}, median", statistics.median(step[at] for step in steps) - usual)
        self.note(f"a {what}, beside the steps", (ended[0] - began) * 1e3)


def timed_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


@contextmanager
def side(name: str, source: Path | None, shape: Shape, data: Path) -> Iterator[Side]:
    """Run a service of one checkout, with a run of each of two tenants on it."""
    flags = [word for key in KEYS for word in ("--api-key", key)]
    with LiveServer(data, *flags, models=(MODEL,), source=source) as server, ExitStack() as stack:
        services = [stack.enter_context(tinkex.ServiceClient(base_url=server.url, api_key=key)) for key in KEYS]
        saving = services[0].create_lora_training_client(MODEL, rank=RANK)
        other = services[1].create_lora_training_client(MODEL, rank=8)
        made = Side(name, saving, other, shape)
        for _ in range(3):  # what is done once, such as laying weights out, is not the question
            made.step(saving)
            made.step(other)
        yield made


def report(sides: list[Side], rounds: int, other_load: float) -> str:
    lines = [
        "# Saving beside training",
        "",
        f"Written by `python -m benchmarks.saving` on {surroundings()}.",
        f"SmolLM2-135M, rank {RANK} with optimizer state, {rounds} rounds, a service of each checkout, in turn. Median "
        "(worst) in ms. Steps beside a save are what is added to the median without it. The machine's load before: "
        f"{other_load:.1f}.",
        "",
        "| | " + " | ".join(each.name for each in sides) + " |",
        "|---|" + "---|" * len(sides),
    ]
    for what in sides[0].times:
        signs = "+" if "beside a" in what or "slowest" in what else ""
        cells = [
            f"{statistics.median(each.times[what]):{signs}.0f} ({max(each.times[what]):{signs}.0f})" for each in sides
        ]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--before", type=Path, metavar="FOLDER", help="an older checkout of tinkex to compare with")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--print", action="store_true", help="only print")
    chosen = options.parse_args()
    sources: dict[str, Path | None] = {} if chosen.before is None else {"before": chosen.before / "src"}
    sources["now"] = None
    shape, other_load = Shape.of(MODEL), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sides = [
            stack.enter_context(side(name, source, shape, Path(folder) / name)) for name, source in sources.items()
        ]
        for number in range(chosen.rounds):
            print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr, flush=True)
            for each in sides:
                each.round()
        text = report(sides, chosen.rounds, other_load)
    print(text)
    if not chosen.print:
        (RESULTS / "saving.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
