"""The progress bar: drawn over on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io

from tests.unit.terminal.emulator import Terminal
from tinkex.terminal.progress_bar import ProgressBar
from tinkex.testing import FakeClock

MB = 1_000_000


def test_the_line_has_bar_bytes_rate_and_time_left() -> None:
    clock = FakeClock()
    bar = ProgressBar(io.StringIO(), clock)
    assert bar.live(100) == ""
    bar.update("weights", 0, 30 * MB)
    clock.advance(2)
    bar.update("weights", 10 * MB, 30 * MB)
    assert bar.live(100) == "weights · █████░░░░░░░░░░░ · 10.0 MB of 30.0 MB (33 %) · 5.0 MB/s · 4 s left"
    assert bar.live(60) == "weights · 10.0 MB of 30.0 MB (33 %) · 5.0 MB/s · 4 s left"
    assert bar.live(45) == "weights · 10.0 MB of 30.0 MB (33 %)"


def test_a_long_name_leaves_room_for_the_numbers() -> None:
    bar = ProgressBar(io.StringIO(), FakeClock())
    bar.update("a-rather-long-name.safetensors", MB, 3 * MB)
    assert bar.live(48) == "a-rather-long-n… · 1.0 MB of 3.0 MB (33 %)"
    assert bar.live(100).startswith("a-rather-long-name.safetensors · ")


def test_a_terminal_keeps_one_line_per_finished_file() -> None:
    with Terminal() as terminal:
        with ProgressBar(terminal.file) as bar:
            bar.update("weights", MB, 3 * MB)
            terminal.wait_for(lambda rows: rows == ["weights · █████░░░░░░░░░░░ · 1.0 MB of 3.0 MB (33 %)"])
            bar.update("config", 5, 10)
            terminal.wait_for(lambda rows: rows[0] == "weights: 1.0 MB of 3.0 MB" and rows[1].startswith("config · "))
            bar.update("config", 10, 10)
        rows = terminal.wait_for_last("config")
    assert rows == ["weights: 1.0 MB of 3.0 MB", "config: 10 B", ""]


def test_a_transfer_that_never_starts_writes_nothing() -> None:
    with Terminal() as terminal:
        bar = ProgressBar(terminal.file)
        with bar:
            pass
        bar.close()
    assert terminal.written == ""


def test_a_plain_file_gets_a_line_every_ten_seconds_and_one_per_file() -> None:
    clock = FakeClock()
    bar = ProgressBar(io.StringIO(), clock)
    lines = []
    for second in range(25):
        bar.update("weights", second * MB, None)
        lines += [bar.due()]
        clock.advance(1)
    assert [line for line in lines if line] == ["weights · 10.0 MB · 1.0 MB/s", "weights · 20.0 MB · 1.0 MB/s"]
    bar.update("config", 5, 5)
    assert bar.remarks() == ["weights: 24.0 MB"]
    assert bar.remarks() == []


def test_bytes_that_were_there_before_do_not_count_as_speed() -> None:
    clock = FakeClock()
    bar = ProgressBar(io.StringIO(), clock)
    bar.update("weights", 900 * MB, 1000 * MB)
    assert bar.rate() is None
    clock.advance(1)
    bar.update("weights", 901 * MB, 1000 * MB)
    assert bar.rate() == MB


def test_a_file_that_starts_over_has_no_negative_speed() -> None:
    clock = FakeClock()
    bar = ProgressBar(io.StringIO(), clock)
    bar.update("weights", 9 * MB, 10 * MB)
    clock.advance(1)
    bar.update("weights", 0, 10 * MB)
    clock.advance(1)
    bar.update("weights", MB, 10 * MB)
    assert bar.rate() == MB


def test_a_file_name_cannot_control_the_terminal() -> None:
    with Terminal() as terminal:
        with ProgressBar(terminal.file) as bar:
            bar.update("a\x1b[2Jb", 1, 2)
        terminal.wait_for_last("a [2Jb: 1 B of 2 B")
    assert "\x1b[2J" not in terminal.written
