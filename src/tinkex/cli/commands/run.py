"""`tinkex run`: lists, describes, names, archives, deletes and watches training runs."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter

import tinkex
from tinkex.cli.arguments import count, seconds
from tinkex.cli.connect import rest_client
from tinkex.cli.named import RUN, run_named
from tinkex.cli.parser import CommandParser
from tinkex.clock import REAL
from tinkex.errors import ConflictError, NotFoundError, TinkexError, ValidationError
from tinkex.terminal import output
from tinkex.terminal.curve import Point, draw
from tinkex.terminal.format import NONE, age, aware, clean, cut, date, number, utc_now
from tinkex.terminal.live import LiveLines, mode_of

PAGE = 100
STATUSES = ("running", "idle", "finished", "failed")
ORDERS = ("created", "last_request", "name", "steps", "loss")
POLL_S = 1.0
MOST_REASON = 300
LEAST_ROWS = 16
"""A terminal with fewer rows shows only the line."""
MOST_ROWS = 16
ABOUT_NAMES = """\
RUN is the name of a run (if several have it, the newest), its id, the beginning of its id, the path
of one of its checkpoints, or `latest` for the run that was used last. A name is given with
create_lora_training_client(..., name="first try", tags=["dpo"]), or with `tinkex run rename`."""
ABOUT_LIST = """\
Lists the newest runs first. WORDS are looked for in names, ids, base models and tags. The first
column is a short id that every command takes; `tinkex run info` and -o json have the whole one. The
loss is that of the last step: the mean over the tokens that count, or what a custom loss returned."""
ABOUT_WATCH = """\
Shows the loss, learning rate and speed of each step, from the first step on and then live. If the
terminal is tall enough, it also shows the curve of the loss. The loss is the mean over the tokens
that count, the speed that of the engine. With -o json every step is one line of JSON. Runs that
other programs train can be watched too; Ctrl-C stops watching, not the run."""
HINT = "Name a run: its name, its id or the beginning of it, or `latest`. `tinkex run list` shows your runs."


def add(parser: CommandParser, about: str) -> None:
    group = parser.add_group(
        "run", about, "tinkex run list", "tinkex run info my-run", "tinkex run watch latest", more=ABOUT_NAMES
    )
    _add_list(group)
    command = group.add_command("info", info, "show one training run", "tinkex run info latest", hint=HINT)
    command.add_argument("run_id", metavar="RUN", help=RUN)
    command = group.add_command(
        "watch", watch, "follow a run while it trains", "tinkex run watch latest",
        "tinkex run watch my-run --until-idle -o json", more=ABOUT_WATCH, hint=HINT,
    )  # fmt: skip
    command.add_argument("run_id", metavar="RUN", help=RUN)
    command.add_argument("--until-idle", action="store_true", help="stop when the run has nothing left to do")
    command.add_argument(
        "--idle-for",
        type=seconds,
        default=10,
        metavar="TIME",
        help="how long the run must be idle for that: 90s, 5m (default 10s)",
    )
    _add_changes(group)


def _add_list(group: CommandParser) -> None:
    command = group.add_command(
        "list", list_runs, "list your training runs", "tinkex run list dpo --status running",
        "tinkex run list --all -o json", more=ABOUT_LIST,
    )  # fmt: skip
    command.add_argument("words", nargs="*", metavar="WORDS", help="only runs that have all of these words")
    command.add_argument("--limit", type=count, default=20, metavar="N", help="how many to list (default 20; 0: all)")
    command.add_argument("--all", action="store_true", help="list all, not only the first 20")
    command.add_argument("--cursor", type=count, default=0, metavar="N", help="leave out the first N")
    command.add_argument("--tag", metavar="TAG", help="only runs with this tag")
    command.add_argument("--status", choices=STATUSES, help="only runs with this status")
    command.add_argument("--model", metavar="NAME", help="only runs on this base model")
    command.add_argument("--archived", action="store_true", help="only archived runs, which are left out otherwise")
    command.add_argument("--order", choices=ORDERS, help="what to sort by (default: created, the newest first)")


def _add_changes(group: CommandParser) -> None:
    command = group.add_command("rename", rename, "name a run", 'tinkex run rename latest "dpo, second try"', hint=HINT)
    command.add_argument("run_id", metavar="RUN", help=RUN)
    command.add_argument("name", metavar="NAME", help='the new name; "" takes the name away')
    command = group.add_command(
        "tag", tag, "add tags to a run, or remove some", "tinkex run tag latest dpo keep",
        "tinkex run tag my-run --remove keep", hint=HINT,
    )  # fmt: skip
    command.add_argument("run_id", metavar="RUN", help=RUN)
    command.add_argument("tags", nargs="*", metavar="TAG", help="tags to add")
    command.add_argument(
        "--remove", action="append", default=[], metavar="TAG", help="a tag to remove; may be repeated"
    )
    command = group.add_command(
        "archive", archive, "leave runs out of lists, and keep all they have", "tinkex run archive my-run other-run",
        "tinkex run archive my-run --undo", hint=HINT,
    )  # fmt: skip
    command.add_argument("runs", nargs="+", metavar="RUN", help=RUN)
    command.add_argument("--undo", action="store_true", help="list them again")
    command = group.add_command(
        "delete", delete, "delete a run and its history for good", "tinkex run delete my-run",
        "tinkex run delete my-run --force -y", hint=HINT,
    )  # fmt: skip
    command.add_argument("runs", nargs="+", metavar="RUN", help=RUN)
    command.add_argument(
        "--force", action="store_true", help="also if it has checkpoints, which are deleted too, or is being trained"
    )
    command.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def list_runs(args: argparse.Namespace) -> None:
    client, limit = rest_client(args), 0 if args.all else args.limit
    has_records = client.has_run_records().result()
    runs, total = _fetch(client, args, limit) if has_records else _fetch_plainly(client, args, limit)
    listed = args.cursor + len(runs)
    is_cut = listed < total
    if is_cut:
        output.remark(f"{len(runs)} of {total} runs are listed; --all lists all, --cursor {listed} the next ones.")
    if args.output == "json":
        output.write_json({"runs": runs, "total": total, "cursor": listed if is_cut else None})
        return
    now = utc_now()
    if not has_records:
        _write_plainly(runs)
        return
    ids = _short_ids([run.training_run_id for run in runs])
    rows = [
        (
            short,
            run.name or NONE,
            run.base_model,
            run.status or NONE,
            NONE if run.steps is None else f"{run.steps:,}",
            NONE if run.loss is None else number(run.loss),
            age(run.created_at or run.last_request_time, now),
            ", ".join(run.tags),
        )
        for short, run in zip(ids, runs, strict=True)
    ]
    titles = ("RUN", "NAME", "MODEL", "STATUS", "STEPS", "LOSS", "AGE", "TAGS")
    output.write_table(titles, rows, numbers=["STEPS", "LOSS", "AGE"])


def info(args: argparse.Namespace) -> None:
    run = run_named(rest_client(args), args.run_id)
    if args.output == "json":
        output.write_json(run)
        return
    now = utc_now()
    fields = [("run", run.training_run_id)]
    fields += [("name", run.name)] if run.name else []
    fields += [("tags", ", ".join(run.tags))] if run.tags else []
    fields += [
        ("model", run.base_model),
        ("owner", run.model_owner),
        ("LoRA rank", _rank(run)),
        ("state", _state(run)),
    ]
    if run.steps is not None:
        fields += [("steps", f"{run.steps:,}"), ("loss", NONE if run.loss is None else f"{run.loss:.4f}")]
    fields += [("created", date(run.created_at, now))] if run.created_at else []
    fields.append(("last used", date(run.last_request_time, now)))
    fields += [("archived", date(run.archived_at, now))] if run.archived_at else []
    for name, saved in (("last state", run.last_checkpoint), ("last sampler", run.last_sampler_checkpoint)):
        text = f"{saved.tinker_path} ({age(saved.time, now)})" if saved else NONE
        fields.append((name, text))
    fields += [(f"metadata {name}", str(value)) for name, value in (run.user_metadata or {}).items()]
    output.write_fields(fields)


def rename(args: argparse.Namespace) -> None:
    client = rest_client(args)
    run = run_named(client, args.run_id)
    renamed = client.rename_run(run.training_run_id, args.name).result()
    _report(args, renamed, f"is called {renamed.name} now" if renamed.name else "has no name now")


def tag(args: argparse.Namespace) -> None:
    if not args.tags and not args.remove:
        raise ValidationError("Name the tags to add, or the tags to remove with --remove.")
    client = rest_client(args)
    run = run_named(client, args.run_id)
    tags = [text for text in [*run.tags, *args.tags] if text not in args.remove]
    tagged = client.tag_run(run.training_run_id, tags).result()
    _report(args, tagged, f"has the tags {', '.join(tagged.tags)}" if tagged.tags else "has no tags now")


def archive(args: argparse.Namespace) -> None:
    client = rest_client(args)
    found = [run_named(client, text) for text in args.runs]
    for run in found:
        archived = client.archive_run(run.training_run_id, not args.undo).result()
        _report(
            args, archived, "is listed again" if args.undo else "is archived: `tinkex run list --archived` lists it"
        )


def delete(args: argparse.Namespace) -> int:
    client = rest_client(args)
    found = {run.training_run_id: run for run in (run_named(client, text) for text in args.runs)}
    if not args.yes and not _is_confirmed(list(found.values())):
        output.remark("Nothing was deleted.")
        return 1
    deleted, failed = [], []
    for run_id in found:
        try:
            deleted.append(client.delete_run(run_id, args.force).result())
        except ConflictError as error:
            reason = error.body.get("detail") if isinstance(error.body, dict) else str(error)
            failed.append({"run": run_id, "error": str(reason).replace("With force=true", "With --force")})
    if args.output == "json":
        output.write_json({"deleted": deleted, "failed": failed})
    for done in deleted if args.output != "json" else ():
        print(f"Deleted {done.training_run_id} and {_counted(len(done.checkpoints), 'checkpoint')}.")
    for failure in failed:
        output.remark(f"tinkex: {failure['error']}")
    return 1 if failed else 0


def _counted(many: int, noun: str) -> str:
    return f"{many} {noun}{'' if many == 1 else 's'}"


def _is_confirmed(runs: list[tinkex.TrainingRun]) -> bool:
    if not sys.stdin.isatty():
        raise ValidationError("Deleting needs a confirmation, and stdin is not a terminal: pass -y to confirm.")
    for run in runs:
        about = f"{run.name}, " if run.name else ""
        output.remark(f"  {clean(run.training_run_id)} ({clean(about)}{run.steps or 0} steps)")
    sys.stderr.write(f"Delete {'this run' if len(runs) == 1 else f'these {len(runs)} runs'} for good? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _report(args: argparse.Namespace, run: tinkex.TrainingRun, text: str) -> None:
    if args.output == "json":
        output.write_json(run)
    else:
        print(f"{run.training_run_id} {clean(text)}.")


def _fetch(client: tinkex.RestClient, args: argparse.Namespace, limit: int) -> tuple[list[tinkex.TrainingRun], int]:
    """Return the runs after the cursor, at most `limit` (0: all), fetched in pages, and the total number of runs."""
    runs: list[tinkex.TrainingRun] = []
    wanted = {"search": " ".join(args.words) or None, "tag": args.tag, "status": args.status, "base_model": args.model}
    wanted |= {"archived": "only" if args.archived else None, "order": args.order}
    while True:
        length = min(PAGE, limit - len(runs)) if limit > 0 else PAGE
        page = client.list_training_runs(limit=length, offset=args.cursor + len(runs), **wanted).result()
        runs += page.training_runs
        total = page.cursor.total_count
        if not page.training_runs or args.cursor + len(runs) >= total or len(runs) == limit:
            return runs, total


def _fetch_plainly(
    client: tinkex.RestClient, args: argparse.Namespace, limit: int
) -> tuple[list[tinkex.TrainingRun], int]:
    """Return the runs of a service that keeps no names of them. Words and tags are looked for here."""
    for option in ("status", "archived", "order"):
        if getattr(args, option):
            raise ValidationError(f"This service does not say what --{option} needs to know of its runs.")
    if not (args.words or args.tag or args.model):
        return _fetch(client, args, limit)
    plain = argparse.Namespace(**{**vars(args), "words": [], "tag": None, "model": None, "cursor": 0})
    runs, _ = _fetch(client, plain, 0)
    matches = [run for run in runs if _matches(run, args)]
    return matches[args.cursor :][: limit or None], len(matches)


def _matches(run: tinkex.TrainingRun, args: argparse.Namespace) -> bool:
    from tinkex.rules.run_names import name_in, tags_in  # loads every type, which `--help` need not

    tags = tags_in(run.user_metadata)
    text = "\n".join((name_in(run.user_metadata) or "", run.training_run_id, run.base_model, *tags)).lower()
    has_tag = args.tag is None or args.tag.lower() in [known.lower() for known in tags]
    return has_tag and args.model in (None, run.base_model) and all(word.lower() in text for word in args.words)


def _write_plainly(runs: list[tinkex.TrainingRun]) -> None:
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


def _short_ids(ids: list[str]) -> list[str]:
    """Return ids of our service as 1f6b09c2:0, the beginning and the number of the run in its session.

    One that several would have, or that is of another form, stays whole.
    """
    short = [re.sub(r"^([0-9a-f]{8})-[0-9a-f-]{27}:train:(\d+)$", r"\1:\2", run_id) for run_id in ids]
    times = Counter(short)
    return [text if times[text] == 1 else run_id for text, run_id in zip(short, ids, strict=True)]


def _rank(run: tinkex.TrainingRun) -> str:
    return str(run.lora_rank) if run.lora_rank is not None else NONE


def _state(run: tinkex.TrainingRun) -> str:
    return "corrupted" if run.corrupted else run.status or "ok"


def watch(args: argparse.Namespace) -> None:
    """Show the steps of a run as they happen, with a curve on a terminal, else a line per step."""
    client = rest_client(args)
    run_id = run_named(client, args.run_id).training_run_id
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
    noun = "loss per token" if "weight:sum" in step.metrics else "loss"
    parts = [f"step {number}", f"{noun} {step.loss:.4f}" if step.loss is not None else f"loss {NONE}"]
    if step.failed:
        parts.append(f"{step.failed} failed: {cut(clean(step.failure), MOST_REASON)}")
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
