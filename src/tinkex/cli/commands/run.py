"""`tinkex run`: lists, describes and watches training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.cli.arguments import count, seconds
from tinkex.cli.connect import rest_client
from tinkex.terminal import output
from tinkex.terminal.format import NONE, age, date, utc_now
from tinkex.terminal.output import Column

if TYPE_CHECKING:
    import argparse

    from tinkex.cli.parser import CommandParser
    from tinkex.client.rest import RestClient
    from tinkex.types import TrainingRun

PAGE = 100
COLUMNS = (
    Column("RUN"),
    Column("MODEL"),
    Column("RANK", is_number=True),
    Column("LAST USED", is_number=True),
    Column("LAST CHECKPOINT"),
    Column("STATE"),
)
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


def watch(args: argparse.Namespace) -> int:
    from tinkex.cli.commands.watch import watch as watch_run

    return watch_run(args)


def list_runs(args: argparse.Namespace) -> int:
    runs, total = _fetch(rest_client(args), args.limit)
    if args.output == "json":
        output.write_json({"runs": runs})
        return 0
    now = utc_now()
    output.write_table(
        COLUMNS,
        [
            (
                run.training_run_id,
                run.base_model,
                _rank(run),
                age(run.last_request_time, now),
                run.last_checkpoint.checkpoint_id if run.last_checkpoint else NONE,
                _state(run),
            )
            for run in runs
        ],
    )
    if len(runs) < total:
        output.remark(f"{len(runs)} of {total} runs; --limit 0 shows all.")
    return 0


def info(args: argparse.Namespace) -> int:
    client = rest_client(args)
    is_path = args.run_id.startswith("tinker://")
    ask = client.get_training_run_by_tinker_path if is_path else client.get_training_run
    run = ask(args.run_id).result()
    if args.output == "json":
        output.write_json(run)
        return 0
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
    return 0


def _fetch(client: RestClient, limit: int) -> tuple[list[TrainingRun], int]:
    """Return the first `limit` runs (0: all), fetched in pages, and the total number of runs."""
    runs: list[TrainingRun] = []
    while True:
        wanted = min(PAGE, limit - len(runs)) if limit > 0 else PAGE
        page = client.list_training_runs(limit=wanted, offset=len(runs)).result()
        runs += page.training_runs
        total = page.cursor.total_count
        if not page.training_runs or len(runs) >= total or len(runs) == limit:
            return runs, total


def _rank(run: TrainingRun) -> str:
    return str(run.lora_rank) if run.lora_rank is not None else NONE


def _state(run: TrainingRun) -> str:
    return "corrupted" if run.corrupted else "ok"
