"""The progress bar: drawn over on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io

import pytest

from tinkex.client.download import Progress
from tinkex.terminal.progress_bar import ProgressBar
from tinkex.testing import FakeClock

from .test_output import Terminal

MB = 1_000_000


def test_a_terminal_sees_bytes_rate_and_time_left_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream, clock = Terminal(), FakeClock()
    bar = ProgressBar(stream, clock)
    bar.update(Progress("weights", 0, 30 * MB))
    clock.advance(2)
    bar.update(Progress("weights", 10 * MB, 30 * MB))
    bar.draw()
    drawn = stream.getvalue().split("\x1b[K")[-1]
    assert drawn == "weights [########................] 10.0 MB of 30.0 MB (33 %), 5.0 MB/s, 0:04 left"
    bar.finish()
    assert stream.getvalue().endswith("\r\x1b[Kweights: 10.0 MB of 30.0 MB\n")


def test_a_bar_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    bar = ProgressBar(stream, FakeClock())
    bar.update(Progress("a-rather-long-name.safetensors", MB, 3 * MB))
    bar.draw()
    assert stream.getvalue().split("\x1b[K")[-1] == "…me.safetensors 1.0 MB of 3.0 MB (33 %)"


def test_elsewhere_there_is_a_line_every_ten_seconds_and_one_per_file() -> None:
    stream, clock = io.StringIO(), FakeClock()
    bar = ProgressBar(stream, clock)
    for second in range(25):
        bar.update(Progress("weights", second * MB, None))
        bar.draw()
        clock.advance(1)
    bar.update(Progress("config", 5, 5))
    bar.finish()
    assert stream.getvalue().splitlines() == [
        "weights: 10.0 MB, 1.0 MB/s",
        "weights: 20.0 MB, 1.0 MB/s",
        "weights: 24.0 MB",
        "config: 5 B",
    ]


def test_what_was_there_before_does_not_count_as_speed() -> None:
    clock = FakeClock()
    bar = ProgressBar(io.StringIO(), clock)
    bar.update(Progress("weights", 900 * MB, 1000 * MB))
    assert bar.rate() is None
    clock.advance(1)
    bar.update(Progress("weights", 901 * MB, 1000 * MB))
    assert bar.rate() == MB


def test_a_file_that_starts_over_does_not_run_backwards() -> None:
    clock = FakeClock()
    bar = ProgressBar(io.StringIO(), clock)
    bar.update(Progress("weights", 9 * MB, 10 * MB))
    clock.advance(1)
    bar.update(Progress("weights", 0, 10 * MB))
    clock.advance(1)
    bar.update(Progress("weights", MB, 10 * MB))
    assert bar.rate() == MB


def test_a_file_name_cannot_drive_the_terminal() -> None:
    stream = Terminal()
    bar = ProgressBar(stream, FakeClock())
    bar.update(Progress("a\x1b[2Jb", 1, 2))
    bar.draw()
    bar.finish()
    assert "\x1b[2J" not in stream.getvalue()
