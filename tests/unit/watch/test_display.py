"""What `tinkex.progress` shows on a pseudo-terminal, in a file and in a notebook. Drawing never harms the loop."""

from __future__ import annotations

import io
import itertools
import logging
import re
import threading

import pytest

import tinkex
from tests.unit.terminal.emulator import Terminal
from tests.unit.watch.conftest import MODEL, PRICES, train
from tinkex.testing import Pending, ScriptedService


def test_a_terminal_shows_one_live_line_and_keeps_the_last(training: tinkex.TrainingClient) -> None:
    with Terminal(columns=140) as terminal:
        print("before", file=terminal.file, flush=True)
        with tinkex.progress(training, 4, prices=PRICES, every_s=0.01, file=terminal.file) as progress:
            for step in progress:
                train(training).result()
                shown = f"step {step + 0}/4"
                rows = terminal.wait_for(lambda rows: shown in rows[-1])  # noqa: B023 (called before the next step)
                assert rows[:-1] == ["before"]
                if step == 3:
                    assert re.fullmatch(
                        r"step 3/4 · ████████████░░░░ · loss [\d.]+ · \d+ tokens · [\d,]+ tokens/s · [\d.]+ s left · "
                        r"\$0\.0\d+ of about \$0\.048",
                        rows[-1],
                    )
        rows = terminal.wait_for_last("4 steps")
    assert len(rows) == 3
    assert re.fullmatch(r"4 steps · loss [\d.]+ → [\d.]+ · 48 tokens · [\d.]+ s · \$0\.048", rows[1])
    assert "\x1b[?25" not in terminal.written, "a hidden cursor would stay hidden after kill -9"


@pytest.mark.parametrize("columns", [12, 30, 50])
def test_a_narrow_terminal_shows_the_step_and_no_wrapped_line(columns: int, training: tinkex.TrainingClient) -> None:
    with Terminal(columns=columns) as terminal:
        with tinkex.progress(training, 2_000, prices=PRICES, every_s=0.01, file=terminal.file) as progress:
            for step in progress:
                train(training).result()
                if step == 3:
                    rows = terminal.wait_for(lambda rows: "step 3/2,000" in rows[-1] or "step 3/2,0" in rows[-1])
                    assert len(rows) == 1
                    assert len(rows[0]) < columns
                    break
        terminal.wait_for_last("048")


def test_the_reason_for_waiting_is_shown_while_it_applies(
    scripted: ScriptedService, training: tinkex.TrainingClient
) -> None:
    reason = "all slots\x1b[2J are busy"
    scripted.script.on("optim_step", nth=2, do=Pending("paused_capacity", reason, times=100, try_again=True))
    with Terminal() as terminal:
        with tinkex.progress(training, 2, every_s=0.01, file=terminal.file) as progress:
            for step in progress:
                future = train(training)
                if step == 1:
                    rows = terminal.wait_for(lambda rows: "queue" in rows[-1])
                    # A service must not steer the user's terminal.
                    assert rows[-1].endswith(" · queue paused_capacity: all slots [2J are busy")
                    future.cancel()
                    terminal.wait_for(lambda rows: "queue" not in rows[-1])
        terminal.wait_for_last("2 steps")


def test_two_at_once_have_a_line_each(service: tinkex.ServiceClient, training: tinkex.TrainingClient) -> None:
    other = service.create_lora_training_client(MODEL, rank=4)
    with Terminal() as terminal:
        print("before", file=terminal.file, flush=True)
        with tinkex.progress(training, 9, label="one", every_s=0.01, file=terminal.file):
            train(training).result()
            with tinkex.progress(other, 3, label="two", every_s=0.01, file=terminal.file) as second:
                for _ in second:
                    train(other).result()
                terminal.wait_for(
                    lambda rows: (
                        [row[:10] for row in rows] == ["before", "one: step ", "two: step "]
                        and "two: step 2/3" in rows[2]
                    )
                )
            rows = terminal.wait_for(lambda rows: rows[1].startswith("two: 3 steps"))
            assert len(rows) == 3
            assert rows[2].startswith("one: step 1/9")
        rows = terminal.wait_for_last("one: 1 of 9 steps")
    assert [row.split(" · ")[0] for row in rows] == ["before", "two: 3 steps", "one: 1 of 9 steps", ""]


def test_progress_in_many_threads_leaves_one_line_each(service: tinkex.ServiceClient) -> None:
    clients = [service.create_lora_training_client(MODEL, rank=4) for _ in range(4)]

    def work(number: int) -> None:
        with tinkex.progress(clients[number], 5, label=f"run {number}", every_s=0.01, file=terminal.file) as progress:
            for _ in progress:
                train(clients[number]).result()

    with Terminal() as terminal:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        rows = terminal.wait_for(lambda rows: rows[-1] == "" and len(rows) == 5)
    assert sorted(row.split(" · ")[0] for row in rows[:4]) == [f"run {number}: 5 steps" for number in range(4)]


def test_print_writes_above_the_live_line(training: tinkex.TrainingClient) -> None:
    with Terminal() as terminal:
        with tinkex.progress(training, 3, every_s=0.01, file=terminal.file) as progress:
            for step in progress:
                train(training).result()
                progress.print("step", step, "\nis over")
        rows = terminal.wait_for_last("3 steps")
    assert rows[:6] == ["step 0", "is over", "step 1", "is over", "step 2", "is over"]
    assert rows[6].startswith("3 steps · ")


def test_a_file_gets_whole_lines_and_no_escape_codes(training: tinkex.TrainingClient) -> None:
    file = io.StringIO()
    with tinkex.progress(training, 4, every_s=0.01, file=file) as progress:
        for step in progress:
            while step == 1 and not file.getvalue():  # a second after the beginning
                threading.Event().wait(0.01)
            train(training).result()
    lines = file.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["step 1/4", "4 steps"]
    assert not set(file.getvalue()) & {"\r", "\x1b", "█"}


def test_a_notebook_gets_one_line_by_carriage_returns_alone(training: tinkex.TrainingClient) -> None:
    class OutStream:  # as ipykernel's: no terminal, but `\r` is honoured; and this one cannot even be asked
        __module__ = "ipykernel.iostream"
        encoding = "utf-8"
        written = ""

        def write(self, text: str) -> None:
            self.written += text

        def flush(self) -> None:
            pass

    file = OutStream()
    with tinkex.progress(training, 3, every_s=0.01, file=file) as progress, tinkex.progress(training, file=file):
        for _ in progress:
            train(training).result()
    assert "\x1b" not in file.written
    lines = [line.rpartition("\r")[2].rstrip() for line in file.written.split("\n")]
    assert [line.split(" · ")[0] for line in lines] == ["3 steps", "3 steps", ""]
    # What is drawn over something longer covers it.
    for line in file.written.split("\n"):
        for before, after in itertools.pairwise(line.split("\r")):
            assert len(after) >= len(before.rstrip())


def test_a_file_that_cannot_be_written_is_logged_once_and_the_loop_continues(
    training: tinkex.TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def isatty(self) -> bool:
            return True

    with (
        caplog.at_level(logging.WARNING, "tinkex.progress"),
        tinkex.progress(training, 3, every_s=0.01, file=Full()) as progress,
    ):
        for _ in progress:
            train(training).result()
            progress.print("anything")
    assert len(progress.history) == 3
    assert [record.getMessage() for record in caplog.records if record.name == "tinkex.progress"] == [
        "Progress can no longer be shown: [Errno 28] No space left on device"
    ]


def test_an_ascii_file_gets_ascii_characters(training: tinkex.TrainingClient) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    with tinkex.progress(training, 2, file=file, live=True, every_s=0.01, label="größer") as progress:
        for _ in progress:
            train(training).result()
    last = raw.getvalue().decode("ascii").rstrip("\n").rpartition("\r")[2].rstrip()
    assert re.fullmatch(r"gr\?\?er: 2 steps \| loss [\d.]+ > [\d.]+ \| 24 tokens \| [\d.]+ s", last)
    assert progress.curve().isascii()


def test_without_a_stderr_nothing_is_drawn_and_nothing_fails(
    training: tinkex.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with tinkex.progress(training, 1) as progress:
        for _ in progress:
            train(training)
    assert len(progress.history) == 1
