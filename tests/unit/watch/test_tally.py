"""What events add up to, and the words for it: by hand, with a clock that stands still. Prices, lines, curves too."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import ConfigError
from tinkex.events import QueueEvent, StartEvent, StepEvent, Usage
from tinkex.terminal.curve import Point, draw
from tinkex.terminal.format import Part, cells, cut, duration, fit, fold, money, number
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


def test_the_loss_is_per_weight_where_the_weight_is_told() -> None:
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


def test_a_loss_that_is_no_number_is_shown_as_such() -> None:
    bench = Bench()
    bench.step(loss=math.nan)
    assert bench.report.live(80).startswith("step 1 · loss nan")


def test_an_optim_step_that_is_heard_of_before_its_pass_waits_for_it() -> None:
    bench = Bench()
    first, applied = bench.start("forward_backward"), bench.start("optim_step")
    second, also_applied = bench.start("forward_backward"), bench.start("optim_step")
    bench.end(also_applied)
    bench.end(second, loss_sum=1.0)
    bench.end(applied)
    assert bench.tally.history == []
    bench.end(first, loss_sum=2.0)
    assert [record.loss for record in bench.tally.history] == [2.0, 1.0]


def test_the_time_left_follows_the_pace_of_the_last_steps() -> None:
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


def test_the_cost_of_what_was_sent_counts_at_once_and_is_given_back_if_it_fails() -> None:
    bench = Bench(table={"model": ROW})
    started = bench.start("forward_backward", train_tokens=1_000_000)
    sample = bench.start("sample", "sampler", prefill_tokens=1_000_000)
    assert bench.tally.cost == 5.0
    bench.end(sample, sampled=500_000)
    assert bench.tally.cost == 6.0
    bench.end(started, ok=False)
    assert bench.tally.cost == 2.0
    assert bench.tally.tokens == 1_500_000


def test_the_first_operation_in_line_says_what_is_waited_for() -> None:
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


def test_whole_lines_come_at_tenths_when_something_changes_and_once_a_quiet_minute() -> None:
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


def test_what_a_line_has_no_room_for_goes_in_the_order_of_its_worth() -> None:
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


def test_numbers_money_and_times_are_written_as_people_write_them() -> None:
    assert [number(x) for x in (2.314, 0.42, 12.34, 1234.5, 0.0, -0.5, 1.2e-7, 4.56e12, math.inf)] == [
        "2.31", "0.420", "12.3", "1,234", "0.00", "-0.500", "1.2e-07", "4.56e+12", "inf",
    ]  # fmt: skip
    assert [money(x, "$") for x in (0, 12.4, 1234.567, 0.03, 0.000418)] == [
        "$0.00", "$12.40", "$1,234.57", "$0.030", "$0.00042",
    ]  # fmt: skip
    assert money(0.5, "EUR") == "0.50 EUR"
    assert [duration(s) for s in (0.04, 9.94, 9.96, 59.4, 59.6, 72, 3599.7, 7_500, 86_399, 273_600)] == [
        "0.0 s", "9.9 s", "10 s", "59 s", "1 min 0 s", "1 min 12 s", "1 h 0 min", "2 h 5 min", "1 d 0 h", "3 d 4 h",
    ]  # fmt: skip


def test_wide_letters_count_twice_and_a_cut_line_fits() -> None:
    assert cells("日本") == 4
    for width in range(1, 12):
        assert cells(cut("日本語 text", width)) <= width
    assert fit([Part("日本語"), Part("x", 1)], 6) == "日本語"
    assert fold("→ …", "latin-1") == "> ~"
    assert fold("→ …", "utf-8") == fold("→ …", None) == "→ …"


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
def test_a_table_that_cannot_be_right_is_refused_by_its_place(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prices.read(table)


def test_a_file_that_is_missing_or_no_table_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        prices.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ConfigError, match=r"bad.toml is no TOML: "):
        prices.read(tmp_path / "bad.toml")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        prices.read(tmp_path / "list.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no JSON"):
        prices.read(tmp_path / "bytes.json")


@pytest.mark.parametrize("is_ascii", [False, True])
@pytest.mark.parametrize(("width", "height"), [(72, 12), (40, 8), (120, 30), (24, 5)])
@pytest.mark.parametrize("count", [2, 7, 5_000])
def test_a_curve_has_the_size_asked_for_and_falls_where_the_values_fall(
    is_ascii: bool, width: int, height: int, count: int
) -> None:
    points = [Point(step, 3.0 - 2.5 * step / count) for step in range(1, count + 1)]
    lines = draw(points, "loss", width, height, is_ascii).splitlines()
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert len(lines[-2]) == width
    assert lines[1].lstrip().startswith(number(points[0].value))
    assert lines[-3].lstrip().startswith("0.500")
    assert lines[-1].split() == ["1", "step", f"{count:,}"]
    starts = [len(line) - len(line[9:].lstrip()) for line in lines[1:-2]]
    assert starts == sorted(starts)
    assert lines[1][7:9].strip() or lines[1][8:10].strip(), "it begins at the top left"
    assert "".join(lines).isascii() == is_ascii


def test_a_curve_of_little_or_nothing_is_drawn_too() -> None:
    assert draw([], "loss") == draw([Point(1, math.nan)], "loss") == "loss: nothing to draw yet."
    assert "2.00" in draw([Point(5, 2.0)], "loss")
    flat = draw([Point(1, 2.0), Point(9, 2.0)], "loss").splitlines()
    assert sum("⠤" in line or "⠒" in line or "⠉" in line or "⣀" in line for line in flat) == 1
    assert len(draw([Point(1, 1.0), Point(2, 2.0)], "loss", 1, 1).splitlines()) == 5
