"""`tinkex run watch`: a run's steps as they are made. A curve and one line that is renewed, or a line for each step."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, TextIO

from tinkex.cli.connect import rest_client
from tinkex.terminal import output
from tinkex.terminal.curve import Point, draw

if TYPE_CHECKING:
    import argparse

    from tinkex.client.rest import RestClient
    from tinkex.types import RunStep, RunStepsResponse

LATEST = "latest"
POLL_S = 1.0
LEAST_ROWS = 16
"""A terminal with fewer rows shows the line alone."""
MOST_ROWS = 16


def watch(args: argparse.Namespace) -> int:
    client = rest_client(args)
    run_id = run_of(client, args.run_id)
    is_json, is_drawn = args.output == "json", sys.stdout.isatty() and args.output != "json"
    picture = Picture(sys.stdout)
    steps: list[RunStep] = []
    idle_since: float | None = None
    after = -1
    page = next_page(client, run_id, after)
    if not is_json:
        output.remark(f"Run {run_id}. Ctrl-C ends the watching; the run goes on.")
    while True:
        for number, step in enumerate(page.steps, len(steps) + 1):
            if is_json:
                _write_json(number, step)
            elif not is_drawn:
                print(line_of(number, step), flush=True)
        steps += page.steps
        is_behind = bool(page.steps) and page.next_seq_id != after
        after = page.next_seq_id
        if is_drawn:
            picture.draw(lines_of(steps, is_active=page.is_active))
        if is_behind:
            idle_since = None  # a long history comes in pages: the next one is asked for at once
        else:
            idle_since = _idle_since(steps, idle_since, is_active=page.is_active)
            if args.until_idle and idle_since is not None and _wall() - idle_since >= args.idle_for:
                if not steps:
                    output.remark("The run has made no step.")
                return 0
            threading.Event().wait(POLL_S)
        page = next_page(client, run_id, after)


def run_of(client: RestClient, given: str) -> str:
    """The id that is meant: `latest`, a checkpoint's path, or an id."""
    from tinkex.errors import ValidationError
    from tinkex.types import ParsedCheckpointTinkerPath

    if given.startswith("tinker://"):
        return ParsedCheckpointTinkerPath.from_tinker_path(given).training_run_id
    if given != LATEST:
        return given
    runs = client.list_training_runs(limit=100).result().training_runs
    if not runs:
        raise ValidationError("There is no run yet. `tinkex run list` shows them once there are.")
    return max(runs, key=lambda found: output.aware(found.last_request_time)).training_run_id


def next_page(client: RestClient, run_id: str, after: int) -> RunStepsResponse:
    """The steps after a number. A service that knows the run but not the question is told from a wrong id."""
    from tinkex.errors import NotFoundError, TinkexError

    try:
        return client.get_run_steps(run_id, after).result()
    except NotFoundError:
        client.get_training_run(run_id).result()
        raise TinkexError(
            "This service does not tell a run's steps, so there is nothing to watch; `tinkex serve` does. "
            f"What it knows of the run: tinkex run info {run_id}"
        ) from None


def line_of(number: int, step: RunStep) -> str:
    """One step in one line."""
    parts = [f"step {number}", f"loss {step.loss:.4f}" if step.loss is not None else f"loss {output.NONE}"]
    if step.evaluation_loss is not None:
        parts.append(f"evaluation {step.evaluation_loss:.4f}")
    if step.learning_rate is not None:
        parts.append(f"learning rate {step.learning_rate:.2g}")
    if step.tokens and step.seconds > 0:
        parts.append(f"{step.tokens / step.seconds:,.0f} tokens/s")
    return "  ".join(parts)


def lines_of(steps: list[RunStep], *, is_active: bool) -> list[str]:
    """What the terminal shows now: a curve if it is tall enough, and the last step."""
    import shutil

    width, rows = shutil.get_terminal_size((80, 24))
    if not steps:
        return ["No step yet: waiting for the first optim_step."]
    state = "at work" if is_active else f"idle, last step {output.age(steps[-1].time, output.now())}"
    last = f"{line_of(len(steps), steps[-1])}  {state}"
    losses = [Point(number, step.loss) for number, step in enumerate(steps, 1) if step.loss is not None]
    if rows < LEAST_ROWS or len(losses) < 2:
        return [last[: width - 1]]
    drawn = draw(losses, "loss", width - 1, min(rows // 2, MOST_ROWS), is_ascii=_is_ascii())
    return [line[: width - 1] for line in (*drawn.splitlines(), last)]


class Picture:
    """Lines of a terminal that are drawn over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._height = 0

    def draw(self, lines: list[str]) -> None:
        up = f"\x1b[{self._height}A" if self._height else ""
        # Each line is cleared when it is written, what is below at the end: nothing flickers.
        self._stream.write(up + "".join(f"\r\x1b[K{line}\n" for line in lines) + "\x1b[J")
        self._stream.flush()
        self._height = len(lines)


def _idle_since(steps: list[RunStep], known: float | None, *, is_active: bool) -> float | None:
    """Since when the run has had nothing to do (wall clock); None while it has."""
    if is_active:
        return None
    if known is not None:
        return known
    return min(output.aware(steps[-1].time).timestamp(), _wall()) if steps else _wall()


def _is_ascii() -> bool:
    """Whether the terminal's encoding lacks the dots of the curve."""
    try:
        "⣿".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return True
    return False


def _wall() -> float:
    from tinkex.clock import REAL

    return REAL.wall()


def _write_json(number: int, step: RunStep) -> None:
    import json

    print(json.dumps({"step": number, **step.model_dump(mode="json")}), flush=True)
