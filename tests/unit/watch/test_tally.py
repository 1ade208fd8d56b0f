"""What events add up to and how it is shown, with events made by hand and a fake clock. Prices too."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import ConfigError
from tinkex.events import QueueEvent, StartEvent, StepEvent, Usage
from tinkex.terminal.curve import Point
from tinkex.testing import FakeClock
from tinkex.watch import prices
from tinkex.watch.report import Report
from tinkex.watch.tally import Tally

ROW = {"train": 4.0, "prefill": 1.0, "sample": 2.0}


class Bench:
    """A tally, its clock, and events made by hand."""

    def __init__(self, steps: int | None = None, table: dict[str, Any] | None = None) -> None:
        self.clock = FakeClock()
        read = prices.read(table) if table else None
        self.tally = Tally("run", "session", None, self.clock, read, read.of("model") if read else None)
        self.report = Report(self.tally, steps, read, None, "", self.clock)
        self._numbers = itertools.count(1)

    def start(self, operation: str, model_id: str = "run", **usage: Any) -> StartEvent:
        started = StartEvent(operation, model_id, next(self._numbers), Usage(**usage), "session")
        self.tally.started(started)
        return started

    def end(self, started: StartEvent, ok: bool = True, sampled: int = 0, **metrics: float) -> None:
        usage = started.usage._replace(sampled_tokens=sampled)
        named = {name.replace("_", ":"): value for name, value in metrics.items()}
        seconds = (0.0, 0.0, 0.0, 0.0, 0.0)
        told = (started.number, usage, named, started.session_id)
        self.tally.ended(StepEvent(started.operation, started.model_id, 0, "", ok, *seconds, "", *told))

    def step(self, loss: float = 1.0, tokens: int = 100, seconds: float = 0.0) -> None:
        passed, stepped = self.start("forward_backward", train_tokens=tokens), self.start("optim_step")
        self.clock.advance(seconds)
        self.end(passed, loss_sum=loss)
        self.end(stepped)


def test_the_loss_is_per_weight_where_the_weight_is_reported() -> None:
    bench = Bench()
    for loss, weight in ((6.0, 2.0), (2.0, 2.0)):  # a batch in two parts
        bench.end(bench.start("forward_backward"), loss_sum=loss, weight_sum=weight)
    bench.end(bench.start("forward"), loss_sum=99.0, weight_sum=1.0)  # an evaluation
    bench.end(bench.start("optim_step"))
    bench.end(bench.start("forward_backward"), loss_sum=6.0)
    bench.end(bench.start("optim_step"))
    # A custom loss is the caller's own; the weights beside it are those of its surrogate.
    bench.end(bench.start("forward_backward_custom"), loss_sum=5.0, weight_sum=2.5)
    bench.end(bench.start("optim_step"))
    bench.end(bench.start("optim_step"))
    assert [record.loss for record in bench.tally.history] == [2.0, 6.0, 5.0, None]


def test_a_nan_loss_is_shown_as_nan() -> None:
    bench = Bench()
    bench.step(loss=math.nan)
    assert bench.report.live(80).startswith("step 1 · loss nan")


def test_an_optim_step_reported_before_its_pass_waits_for_it() -> None:
    bench = Bench()
    first, applied = bench.start("forward_backward"), bench.start("optim_step")
    second, also_applied = bench.start("forward_backward"), bench.start("optim_step")
    bench.end(also_applied)
    bench.end(second, loss_sum=1.0)
    bench.end(applied)
    assert bench.tally.history == []
    bench.end(first, loss_sum=2.0)
    assert [record.loss for record in bench.tally.history] == [2.0, 1.0]


def test_the_time_left_follows_the_speed_of_the_last_steps() -> None:
    bench = Bench(steps=30)
    assert bench.tally.seconds_left(30) is None
    for _ in range(10):
        bench.step(seconds=60.0)
    for _ in range(10):
        bench.step(seconds=2.0)
    assert bench.tally.seconds_left(30) == pytest.approx(20.0)
    assert bench.tally.tokens_per_s() == pytest.approx(50.0)
    bench.clock.advance(500)  # a slow one takes nothing away from those after it
    assert bench.tally.seconds_left(30) == pytest.approx(18.0)


def test_the_cost_of_a_call_counts_at_once_and_is_removed_if_the_call_fails() -> None:
    bench = Bench(table={"model": ROW})
    started = bench.start("forward_backward", train_tokens=1_000_000)
    sample = bench.start("sample", "sampler", prefill_tokens=1_000_000)
    assert bench.tally.cost == 5.0
    bench.end(sample, sampled=500_000)
    assert bench.tally.cost == 6.0
    bench.end(started, ok=False)
    assert bench.tally.cost == 2.0
    assert bench.tally.tokens == 1_500_000


def test_the_reason_shown_is_that_of_the_first_waiting_operation() -> None:
    bench = Bench()
    first, second = bench.start("forward_backward"), bench.start("optim_step")

    def tell(started: StartEvent, state: str, reason: str | None) -> None:
        told = (started.operation, "request", state, reason, started.model_id, "session", started.number)
        bench.tally.queued(QueueEvent(*told))

    tell(second, "active", "1 operation of this run before it")
    tell(first, "paused_capacity", None)
    assert bench.report.live(80) == "step 0 · queue paused_capacity"
    tell(first, "active", None)
    assert bench.report.live(80) == "step 0", "that it is in line is no news"
    tell(second, "unknown", None)
    assert bench.report.live(80) == "step 0"
    tell(first, "paused_rate_limit", "too fast")
    tell(StartEvent("forward_backward", "another run", 99), "paused_capacity", "of another run")
    bench.end(first)
    assert bench.report.live(80) == "step 0"


def test_whole_lines_come_at_tenths_after_changes_and_once_a_minute() -> None:
    bench = Bench(steps=100)

    def lines(steps: int, seconds: float) -> list[str]:
        said = []
        for _ in range(steps):
            bench.step(seconds=seconds)
            said.append(bench.report.due())
        return [text.partition(" · ")[0].removeprefix("step ") for text in said if text]

    assert lines(20, 0.2) == ["10/100", "20/100"]
    assert lines(10, 0.05) == []  # a tenth of the way, but within a second of the line before
    assert lines(10, 7.0) == ["31/100", "33/100", "35/100", "37/100", "39/100", "40/100"]
    said = []
    for _ in range(12):
        bench.clock.advance(10)
        said.append(bench.report.due())
    assert [index for index, text in enumerate(said) if text] == [5, 11]


def test_a_narrow_line_drops_its_least_important_parts_first() -> None:
    bench = Bench(steps=200, table={"model": ROW})
    bench.report.notes["reward"] = [Point(1, 0.5)]
    bench.step(loss=2.3456, tokens=5_000, seconds=10.0)
    shown = [bench.report.live(width) for width in (200, 105, 85, 68, 60, 45, 30, 16, 9)]
    assert shown == [
        "step 1/200 · ░░░░░░░░░░░░░░░░ · loss 2.35 · reward 0.500 · 5,000 tokens · 500 tokens/s · 33 min 10 s left · "
        "$0.020 of about $4.00",
        "step 1/200 · loss 2.35 · reward 0.500 · 500 tokens/s · 33 min 10 s left · $0.020 of about $4.00",
        "step 1/200 · loss 2.35 · reward 0.500 · 33 min 10 s left · $0.020 of about $4.00",
        "step 1/200 · loss 2.35 · reward 0.500 · 33 min 10 s left · $0.020",
        "step 1/200 · loss 2.35 · reward 0.500 · 33 min 10 s left",
        "step 1/200 · loss 2.35 · reward 0.500",
        "step 1/200 · reward 0.500",
        "step 1/200",
        "step 1/2…",
    ]


@pytest.mark.parametrize(("name", "write"), [("p.json", json.dumps), ("p.toml", None), ("prices", None)])
def test_prices_are_read_from_a_mapping_or_a_file(name: str, write: Any, tmp_path: Path) -> None:
    table = {"currency": "€", "a/b": ROW}
    text = write(table) if write else 'currency = "€"\n["a/b"]\ntrain = 4\nprefill = 1.0\nsample = 2\n'
    (tmp_path / name).write_text(text, encoding="utf-8")
    read = prices.read(tmp_path / name)
    assert read == prices.read(str(tmp_path / name)) == prices.read(table)
    assert read.currency == "€"
    assert read.of("a/b").of(Usage(1_000_000, 500_000, 250_000)) == 5.0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "names no model"),
        ({"currency": 3, "a": ROW}, "currency is a short text"),
        ({"a": 3}, "needs train, prefill and sample, but is 3"),
        ({"a": {"train": 1}}, "needs train, prefill and sample, but has train"),
        ({"a": {**ROW, "training": 1}}, "but has train, prefill, sample, training"),
        ({"a": {**ROW, "train": "1"}}, "'a' train is '1'; it must be a number from 0 up"),
        ({"a": {**ROW, "train": -1}}, "train is -1"),
        ({"a": {**ROW, "sample": math.nan}}, "sample is nan"),
    ],
)
def test_an_invalid_price_table_is_rejected_with_model_and_value(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prices.read(table)


def test_a_missing_or_invalid_price_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        prices.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ConfigError, match=r"bad.toml is not valid TOML: "):
        prices.read(tmp_path / "bad.toml")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="contains a list"):
        prices.read(tmp_path / "list.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        prices.read(tmp_path / "bytes.json")
