"""`tinkex run watch`: shows the steps of a run as they happen, with a curve on a terminal, else a line per step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tinkex.cli.connect import rest_client
from tinkex.terminal import output
from tinkex.terminal.curve import Point, draw
from tinkex.terminal.format import NONE, age, aware, utc_now
from tinkex.terminal.live import LiveLines, mode_of

if TYPE_CHECKING:
    import argparse

    from tinkex.client.rest import RestClient
    from tinkex.types import RunStep, RunStepsResponse

LATEST = "latest"
POLL_S = 1.0
LEAST_ROWS = 16
"""A terminal with fewer rows shows only the line."""
MOST_ROWS = 16


def watch(args: argparse.Namespace) -> int:
    client = rest_client(args)
    run_id = run_of(client, args.run_id)
    page = next_page(client, run_id, -1)
    if args.output != "json":
        output.remark(f"Run {run_id}. Ctrl-C stops watching; the run continues.")
    display = LiveLines(sys.stdout, mode_of(sys.stdout, False if args.output == "json" else None))
    try:
        return _follow(args, client, run_id, page, display)
    finally:
        display.leave()


def _follow(
    args: argparse.Namespace, client: RestClient, run_id: str, page: RunStepsResponse, display: LiveLines
) -> int:
    """Show the steps until the run is idle (with --until-idle) or for ever."""
    from tinkex.clock import REAL

    steps: list[RunStep] = []
    idle_since: float | None = None
    after = -1
    while True:
        if display.mode == "plain":
            for number, step in enumerate(page.steps, len(steps) + 1):
                print(_json_of(number, step) if args.output == "json" else line_of(number, step), flush=True)
        steps += page.steps
        is_behind = bool(page.steps) and page.next_seq_id != after
        after = page.next_seq_id
        display.draw(lines_of(steps, *display.size(), encoding=sys.stdout.encoding, is_active=page.is_active))
        if is_behind:
            idle_since = None  # a long history comes in pages: ask for the next one at once
        else:
            idle_since = _idle_since(steps, idle_since, REAL.wall(), is_active=page.is_active)
            if args.until_idle and idle_since is not None and REAL.wall() - idle_since >= args.idle_for:
                if not steps:
                    output.remark("The run has no steps.")
                return 0
            REAL.pause(POLL_S)
        page = next_page(client, run_id, after)


def run_of(client: RestClient, name: str) -> str:
    """Return the id of the run that the user named: by `latest`, by a checkpoint's path, or by its id."""
    from tinkex.errors import ValidationError
    from tinkex.types import ParsedCheckpointTinkerPath

    if name.startswith("tinker://"):
        return ParsedCheckpointTinkerPath.from_tinker_path(name).training_run_id
    if name != LATEST:
        return name
    runs = client.list_training_runs(limit=100).result().training_runs
    if not runs:
        raise ValidationError("There is no training run yet. Start one, or name another service with TINKER_BASE_URL.")
    return max(runs, key=lambda run: aware(run.last_request_time)).training_run_id


def next_page(client: RestClient, run_id: str, after: int) -> RunStepsResponse:
    """Return the steps after `after`. On 404, find out whether the run is unknown or the service lacks the call."""
    from tinkex.errors import NotFoundError, TinkexError

    try:
        return client.get_run_steps(run_id, after).result()
    except NotFoundError:
        client.get_training_run(run_id).result()
        raise TinkexError(
            "This service does not report the steps of a run, so there is nothing to watch; `tinkex serve` does. "
            f"To see what it knows about the run: tinkex run info {run_id}"
        ) from None


def line_of(number: int, step: RunStep) -> str:
    """Return one step as one line."""
    parts = [f"step {number}", f"loss {step.loss:.4f}" if step.loss is not None else f"loss {NONE}"]
    if step.evaluation_loss is not None:
        parts.append(f"evaluation {step.evaluation_loss:.4f}")
    if step.learning_rate is not None:
        parts.append(f"learning rate {step.learning_rate:.2g}")
    if step.tokens and step.seconds > 0:
        parts.append(f"{step.tokens / step.seconds:,.0f} tokens/s")
    return "  ".join(parts)


def lines_of(steps: list[RunStep], width: int, rows: int, *, encoding: str | None, is_active: bool) -> list[str]:
    """Return what the terminal shows now: a curve if it is tall enough, and the last step."""
    if not steps:
        return ["No step yet: waiting for the first optim_step."]
    state = "training" if is_active else f"idle, last step {age(steps[-1].time, utc_now())}"
    last = f"{line_of(len(steps), steps[-1])}  {state}"
    losses = [Point(number, step.loss) for number, step in enumerate(steps, 1) if step.loss is not None]
    if rows < LEAST_ROWS or len(losses) < 2:
        return [last]
    return [*draw(losses, "loss", width - 1, min(rows // 2, MOST_ROWS), encoding).splitlines(), last]


def _idle_since(steps: list[RunStep], known: float | None, now: float, *, is_active: bool) -> float | None:
    """Return since when the run has had nothing to do (wall clock); None while it has."""
    if is_active:
        return None
    if known is not None:
        return known
    return min(aware(steps[-1].time).timestamp(), now) if steps else now


def _json_of(number: int, step: RunStep) -> str:
    import json

    return json.dumps({"step": number, **step.model_dump(mode="json")})
