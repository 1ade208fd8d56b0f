"""`tinkex run`: lists, describes and watches training runs."""

from __future__ import annotations

import argparse
import sys

import tinkex
from tinkex.cli.arguments import count, seconds
from tinkex.cli.connect import rest_client
from tinkex.cli.parser import CommandParser
from tinkex.clock import REAL
from tinkex.errors import NotFoundError, TinkexError, ValidationError
from tinkex.terminal import output
from tinkex.terminal.curve import Point, draw
from tinkex.terminal.format import NONE, age, aware, date, utc_now
from tinkex.terminal.live import LiveLines, mode_of

PAGE = 100
LATEST = "latest"
POLL_S = 1.0
LEAST_ROWS = 16
"""A terminal with fewer rows shows only the line."""
MOST_ROWS = 16
ABOUT_WATCH = """\
Shows the loss, learning rate and speed of each step, from the first step on and then live. If the
terminal is tall enough, it also shows the curve of the loss. The loss is the mean over the tokens
that count, the speed that of the engine. With -o json every step is one line of JSON. Runs that
other programs train can be watched too; Ctrl-C stops watching, not the run."""


def add(parser: CommandParser, about: str) -> None:
    group = parser.add_group(
        "run", about, "tinkex run list --limit 5", "tinkex run info RUN", "tinkex run watch latest"
    )
    command = group.add_command("list", list_runs, "list your training runs", "tinkex run list --limit 0 -o json")
    command.add_argument("--limit", type=count, default=20, metavar="N", help="how many to show (default 20; 0: all)")
    command = group.add_command(
        "info", info, "show one training run", "tinkex run info 6f5f0b43-…:train:0",
        hint="Name a run: its id, or the path of one of its checkpoints. `tinkex run list` shows your runs.",
    )  # fmt: skip
    command.add_argument("run_id", metavar="RUN", help="id of the run, or path of one of its checkpoints")
    command = group.add_command(
        "watch", watch, "follow a run while it trains", "tinkex run watch latest",
        "tinkex run watch 6f5f0b43-…:train:0 --until-idle -o json", more=ABOUT_WATCH,
        hint="Name a run, or write `latest` for the run that was used last. `tinkex run list` shows your runs.",
    )  # fmt: skip
    command.add_argument("run_id", metavar="RUN", help="id of the run, path of one of its checkpoints, or latest")
    command.add_argument("--until-idle", action="store_true", help="stop when the run has nothing left to do")
    command.add_argument(
        "--idle-for",
        type=seconds,
        default=10,
        metavar="TIME",
        help="how long the run must be idle for that: 90s, 5m (default 10s)",
    )


def list_runs(args: argparse.Namespace) -> None:
    runs, total = _fetch(rest_client(args), args.limit)
    if args.output == "json":
        output.write_json({"runs": runs})
        return
    now = utc_now()
    rows = [
        (
            run.training_run_id,
            run.base_model,
            _rank(run),
            age(run.last_request_time, now),
            run.last_checkpoint.checkpoint_id if run.last_checkpoint else NONE,
            _state(run),
        )
        for run in runs
    ]
    titles = ("RUN", "MODEL", "RANK", "LAST USED", "LAST CHECKPOINT", "STATE")
    output.write_table(titles, rows, numbers=["RANK", "LAST USED"])
    if len(runs) < total:
        output.remark(f"{len(runs)} of {total} runs; --limit 0 shows all.")


def info(args: argparse.Namespace) -> None:
    client = rest_client(args)
    is_path = args.run_id.startswith("tinker://")
    ask = client.get_training_run_by_tinker_path if is_path else client.get_training_run
    run = ask(args.run_id).result()
    if args.output == "json":
        output.write_json(run)
        return
    now = utc_now()
    fields = [
        ("run", run.training_run_id),
        ("model", run.base_model),
        ("owner", run.model_owner),
        ("LoRA rank", _rank(run)),
        ("state", _state(run)),
        ("last used", date(run.last_request_time, now)),
    ]
    for name, saved in (("last state", run.last_checkpoint), ("last sampler", run.last_sampler_checkpoint)):
        text = f"{saved.tinker_path} ({age(saved.time, now)})" if saved else NONE
        fields.append((name, text))
    fields += [(f"metadata {name}", str(value)) for name, value in (run.user_metadata or {}).items()]
    output.write_fields(fields)


def _fetch(client: tinkex.RestClient, limit: int) -> tuple[list[tinkex.TrainingRun], int]:
    """Return the first `limit` runs (0: all), fetched in pages, and the total number of runs."""
    runs: list[tinkex.TrainingRun] = []
    while True:
        wanted = min(PAGE, limit - len(runs)) if limit > 0 else PAGE
        page = client.list_training_runs(limit=wanted, offset=len(runs)).result()
        runs += page.training_runs
        total = page.cursor.total_count
        if not page.training_runs or len(runs) >= total or len(runs) == limit:
            return runs, total


def _rank(run: tinkex.TrainingRun) -> str:
    return str(run.lora_rank) if run.lora_rank is not None else NONE


def _state(run: tinkex.TrainingRun) -> str:
    return "corrupted" if run.corrupted else "ok"


def watch(args: argparse.Namespace) -> None:
    """Show the steps of a run as they happen, with a curve on a terminal, else a line per step."""
    client = rest_client(args)
    run_id = run_of(client, args.run_id)
    page = next_page(client, run_id, -1)
    if args.output != "json":
        output.remark(f"Run {run_id}. Ctrl-C stops watching; the run continues.")
    display = LiveLines(sys.stdout, mode_of(sys.stdout, False if args.output == "json" else None))
    try:
        _follow(args, client, run_id, page, display)
    finally:
        display.leave()


def _follow(
    args: argparse.Namespace,
    client: tinkex.RestClient,
    run_id: str,
    page: tinkex.types.RunStepsResponse,
    display: LiveLines,
) -> None:
    """Show the steps until the run is idle (with --until-idle) or for ever."""
    import json

    steps: list[tinkex.types.RunStep] = []
    idle_since: float | None = None
    after = -1
    while True:
        if display.mode == "plain":
            for number, step in enumerate(page.steps, len(steps) + 1):
                if args.output == "json":
                    line = json.dumps({"step": number, **step.model_dump(mode="json")})
                else:
                    line = line_of(number, step)
                print(line, flush=True)
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
                return
            REAL.pause(POLL_S)
        page = next_page(client, run_id, after)


def run_of(client: tinkex.RestClient, name: str) -> str:
    """Return the id of the run that the user named: by `latest`, by a checkpoint's path, or by its id."""
    if name.startswith("tinker://"):
        return tinkex.ParsedCheckpointTinkerPath.from_tinker_path(name).training_run_id
    if name != LATEST:
        return name
    runs = client.list_training_runs(limit=100).result().training_runs
    if not runs:
        raise ValidationError("There is no training run yet. Start one, or name another service with TINKER_BASE_URL.")
    return max(runs, key=lambda run: aware(run.last_request_time)).training_run_id


def next_page(client: tinkex.RestClient, run_id: str, after: int) -> tinkex.types.RunStepsResponse:
    """Return the steps after `after`. On 404, find out whether the run is unknown or the service lacks the call."""
    try:
        return client.get_run_steps(run_id, after).result()
    except NotFoundError:
        client.get_training_run(run_id).result()
        raise TinkexError(
            "This service does not report the steps of a run, so there is nothing to watch; `tinkex serve` does. "
            f"To see what it knows about the run: tinkex run info {run_id}"
        ) from None


def line_of(number: int, step: tinkex.types.RunStep) -> str:
    """Return one step as one line."""
    parts = [f"step {number}", f"loss {step.loss:.4f}" if step.loss is not None else f"loss {NONE}"]
    if step.evaluation_loss is not None:
        parts.append(f"evaluation {step.evaluation_loss:.4f}")
    if step.learning_rate is not None:
        parts.append(f"learning rate {step.learning_rate:.2g}")
    if step.tokens and step.seconds > 0:
        parts.append(f"{step.tokens / step.seconds:,.0f} tokens/s")
    return "  ".join(parts)


def lines_of(
    steps: list[tinkex.types.RunStep], width: int, rows: int, *, encoding: str | None, is_active: bool
) -> list[str]:
    """Return what the terminal shows now: a curve if it is tall enough, and the last step."""
    if not steps:
        return ["No step yet: waiting for the first optim_step."]
    state = "training" if is_active else f"idle, last step {age(steps[-1].time, utc_now())}"
    last = f"{line_of(len(steps), steps[-1])}  {state}"
    losses = [Point(number, step.loss) for number, step in enumerate(steps, 1) if step.loss is not None]
    if rows < LEAST_ROWS or len(losses) < 2:
        return [last]
    return [*draw(losses, "loss", width - 1, min(rows // 2, MOST_ROWS), encoding).splitlines(), last]


def _idle_since(steps: list[tinkex.types.RunStep], known: float | None, now: float, *, is_active: bool) -> float | None:
    """Return since when the run has had nothing to do (wall clock); None while it has."""
    if is_active:
        return None
    if known is not None:
        return known
    return min(aware(steps[-1].time).timestamp(), now) if steps else now
