"""`tinkex run`: training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.cli.arguments import count, seconds
from tinkex.cli.connect import rest_client
from tinkex.terminal import output
from tinkex.terminal.format import NONE, age, date, utc_now
from tinkex.terminal.output import Column

if TYPE_CHECKING:
    import argparse

    from tinkex.cli.main import Words
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
Shows each step's loss, learning rate and speed, and the curve of the loss if the terminal is tall
enough: from the first step on, then live. The loss is the mean over the tokens that count, the
speed that of the engine. With -o json every step is one line of JSON. A run that another program
is training can be watched from anywhere; Ctrl-C ends the watching, not the run."""


def add(words: Words, about: str) -> None:
    nouns = words.noun("run", about, "tinkex run list --limit 5", "tinkex run info RUN", "tinkex run watch latest")
    made = nouns.add("list", list_runs, "list your training runs", "tinkex run list --limit 0 -o json")
    made.add_argument("--limit", type=count, default=20, metavar="N", help="how many (default 20; 0: all)")
    made = nouns.add("info", info, "show one training run", "tinkex run info 6f5f0b43-…:train:0")
    made.add_argument("run_id", metavar="RUN", help="the id, or the path of one of its checkpoints")
    made = nouns.add(
        "watch", watch, "follow a run while it trains", "tinkex run watch latest",
        "tinkex run watch 6f5f0b43-…:train:0 --until-idle -o json", more=ABOUT_WATCH,
    )  # fmt: skip
    made.add_argument("run_id", metavar="RUN", help="the id, the path of one of its checkpoints, or latest")
    made.add_argument("--until-idle", action="store_true", help="end by itself when the run has nothing to do any more")
    made.add_argument(
        "--idle-for", type=seconds, default=10, metavar="TIME", help="how long that must last: 90s, 5m (default 10s)"
    )


def watch(args: argparse.Namespace) -> int:
    from tinkex.cli.commands.watch import watch as follow

    return follow(args)


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
                found.training_run_id,
                found.base_model,
                _rank(found),
                age(found.last_request_time, now),
                found.last_checkpoint.checkpoint_id if found.last_checkpoint else NONE,
                _state(found),
            )
            for found in runs
        ],
    )
    if len(runs) < total:
        output.remark(f"{len(runs)} of {total} runs; --limit 0 shows all.")
    return 0


def info(args: argparse.Namespace) -> int:
    client = rest_client(args)
    is_path = args.run_id.startswith("tinker://")
    ask = client.get_training_run_by_tinker_path if is_path else client.get_training_run
    found = ask(args.run_id).result()
    if args.output == "json":
        output.write_json(found)
        return 0
    now = utc_now()
    fields = [
        ("run", found.training_run_id),
        ("model", found.base_model),
        ("owner", found.model_owner),
        ("LoRA rank", _rank(found)),
        ("state", _state(found)),
        ("last used", date(found.last_request_time, now)),
    ]
    for name, saved in (("last state", found.last_checkpoint), ("last sampler", found.last_sampler_checkpoint)):
        text = f"{saved.tinker_path} ({age(saved.time, now)})" if saved else NONE
        fields.append((name, text))
    fields += [(f"metadata {name}", str(value)) for name, value in (found.user_metadata or {}).items()]
    output.write_fields(fields)
    return 0


def _fetch(client: RestClient, limit: int) -> tuple[list[TrainingRun], int]:
    """The first `limit` runs (0: all), page by page, and how many there are."""
    runs: list[TrainingRun] = []
    while True:
        wanted = min(PAGE, limit - len(runs)) if limit > 0 else PAGE
        page = client.list_training_runs(limit=wanted, offset=len(runs)).result()
        runs += page.training_runs
        total = page.cursor.total_count
        if not page.training_runs or len(runs) >= total or len(runs) == limit:
            return runs, total


def _rank(found: TrainingRun) -> str:
    return str(found.lora_rank) if found.lora_rank is not None else NONE


def _state(found: TrainingRun) -> str:
    return "corrupted" if found.corrupted else "ok"
