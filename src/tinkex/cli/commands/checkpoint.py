"""`tinkex checkpoint`: lists, publishes, expires, deletes and downloads saved weights."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import tinkex
from tinkex.cli.arguments import count, seconds, seconds_or_keep
from tinkex.cli.connect import rest_client
from tinkex.cli.error_text import describe
from tinkex.cli.named import CHECKPOINT, RUN, checkpoint_named, run_named
from tinkex.cli.parser import CommandParser
from tinkex.errors import APIStatusError, TinkexError, ValidationError
from tinkex.terminal import output
from tinkex.terminal.format import age, aware, clean, date, duration, expiry, size, utc_now

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 1000
LOOK_S = 0.5
"""How soon Ctrl-C is noticed where waiting for a future cannot be interrupted (Windows)."""
PATH = "tinker://RUN/weights/0001"
ABOUT_KINDS = """\
There are two kinds. save_state creates tinker://RUN/weights/NAME, which includes the optimizer:
training can continue from it. save_weights_for_sampler creates tinker://RUN/sampler_weights/NAME,
which is smaller and for sampling (`tinkex chat`, `tinkex sample -m`). Both can be downloaded and
exported."""


def add(parser: CommandParser, about: str) -> None:
    group = parser.add_group(
        "checkpoint", about, "tinkex checkpoint list", f"tinkex checkpoint info {PATH}",
        f"tinkex checkpoint download {PATH} -d adapters", more=ABOUT_KINDS,
    )  # fmt: skip
    command = group.add_command(
        "list", list_checkpoints, "list saved weights", "tinkex checkpoint list my-run",
        "tinkex checkpoint list --expires-within 2d --limit 0",
    )  # fmt: skip
    command.add_argument("run_name", nargs="?", metavar="RUN", help=f"only checkpoints of this run: {RUN}")
    command.add_argument("--run-id", metavar="RUN", help="the same")
    command.add_argument("--limit", type=count, default=20, metavar="N", help="how many to show (default 20; 0: all)")
    command.add_argument(
        "--expires-within", type=seconds, metavar="TIME", help="only those that expire within: 3600, 12h, 2d"
    )
    for name, run, about in (
        ("info", info, "show one checkpoint"),
        ("publish", publish, "make a checkpoint public"),
        ("unpublish", unpublish, "make a checkpoint private again"),
    ):
        command = group.add_command(name, run, about, f"tinkex checkpoint {name} {PATH}")
        command.add_argument("path", metavar="PATH", help=CHECKPOINT)
    command = group.add_command(
        "set-ttl", set_ttl, "set when a checkpoint expires", f"tinkex checkpoint set-ttl {PATH} 7d",
        f"tinkex checkpoint set-ttl {PATH} keep",
    )  # fmt: skip
    command.add_argument("path", metavar="PATH", help=CHECKPOINT)
    command.add_argument(
        "ttl", metavar="TIME|keep", type=seconds_or_keep, help="from now: 3600, 12h, 7d; keep: never expire"
    )
    command = group.add_command(
        "delete", delete, "delete checkpoints permanently", f"tinkex checkpoint delete {PATH}",
        "tinkex checkpoint delete --run-id RUN -y",
    )  # fmt: skip
    command.add_argument("paths", nargs="*", metavar="PATH", help="tinker://…, or RUN/weights/NAME")
    command.add_argument("--run-id", metavar="RUN", help="all checkpoints of this run")
    command.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")
    command = group.add_command(
        "download", download, "download a checkpoint's files", f"tinkex checkpoint download {PATH} -d adapters",
        more="Run the command again to continue an interrupted download. If the service offers no archives, a\n"
        "temporary export is created, for which a training session is opened and closed.",
    )  # fmt: skip
    command.add_argument("path", metavar="PATH", help=CHECKPOINT)
    command.add_argument("-d", "--dir", default=".", help="where to create the checkpoint's folder (default: here)")
    command.add_argument("--keep-archive", action="store_true", help="keep the tar file too")


def list_checkpoints(args: argparse.Namespace) -> None:
    now, within_s, client = utc_now(), args.expires_within, rest_client(args)
    run = args.run_name or args.run_id
    run_id = None if run is None else run_named(client, run).training_run_id
    total: list[int] = []
    pages = list_pages(client, run_id, args.limit if within_s is None else 0, total)
    if within_s is not None:
        pages = (
            saved
            for saved in pages
            if saved.expires_at is not None and (aware(saved.expires_at) - now).total_seconds() <= within_s
        )
    found = list(itertools.islice(pages, args.limit + 1 if args.limit else None))
    checkpoints = found[: args.limit or None]
    if len(checkpoints) < len(found):
        of_all = f" of {total[-1]}" if total and within_s is None else ""
        output.remark(f"Only the first {args.limit}{of_all} checkpoints are listed; --limit 0 lists all.")
    if args.output == "json":
        known = {"total": total[-1]} if total and within_s is None else {}
        output.write_json({"checkpoints": checkpoints, **known})
        return
    rows = [
        (
            saved.tinker_path,
            str(saved.checkpoint_type),
            size(saved.size_bytes),
            age(saved.time, now),
            expiry(saved.expires_at, now),
            _yes(saved.public),
        )
        for saved in checkpoints
    ]
    output.write_table(("PATH", "TYPE", "SIZE", "AGE", "EXPIRES", "PUBLIC"), rows, numbers=["SIZE", "AGE"])


def info(args: argparse.Namespace) -> None:
    client = rest_client(args)
    path = checkpoint_named(client, args.path)
    run_id = _run_of(path)
    checkpoints = client.list_checkpoints(run_id).result().checkpoints
    saved = next((checkpoint for checkpoint in checkpoints if checkpoint.tinker_path == path), None)
    if saved is None:
        raise TinkexError(
            f"Run {run_id} has no checkpoint {path}. `tinkex checkpoint list --run-id {run_id}` lists them."
        )
    try:
        weights = client.get_weights_info_by_tinker_path(path).result()
    except APIStatusError:
        weights = None  # services before 0.6 lack the call, and some checkpoints the information
    if args.output == "json":
        output.write_json({**saved.model_dump(mode="json"), **(weights.model_dump(mode="json") if weights else {})})
        return
    now = utc_now()
    fields = [
        ("path", saved.tinker_path),
        ("type", str(saved.checkpoint_type)),
        ("size", size(saved.size_bytes)),
        ("saved", date(saved.time, now)),
        ("expires", expiry(saved.expires_at, now)),
        ("public", _yes(saved.public)),
    ]
    if weights is not None:
        fields.append(("model", weights.base_model))
        fields.append(("LoRA rank", str(weights.lora_rank) if weights.is_lora else "no LoRA"))
    fields += [(f"metadata {name}", str(value)) for name, value in (saved.user_metadata or {}).items()]
    output.write_fields(fields)


def publish(args: argparse.Namespace) -> None:
    client = rest_client(args)
    args.path = checkpoint_named(client, args.path)
    client.publish_checkpoint_from_tinker_path(args.path).result()
    _report_change(args, "public", True, "is public now")


def unpublish(args: argparse.Namespace) -> None:
    client = rest_client(args)
    args.path = checkpoint_named(client, args.path)
    client.unpublish_checkpoint_from_tinker_path(args.path).result()
    _report_change(args, "public", False, "is private now")


def set_ttl(args: argparse.Namespace) -> None:
    client = rest_client(args)
    args.path = checkpoint_named(client, args.path)
    client.set_checkpoint_ttl_from_tinker_path(args.path, args.ttl).result()
    text = "never expires now" if args.ttl is None else f"expires in {duration(args.ttl, 4)}"
    _report_change(args, "ttl_seconds", args.ttl, text)


def delete(args: argparse.Namespace) -> int:
    if bool(args.paths) == bool(args.run_id):
        raise ValidationError(
            "Name the checkpoints to delete, or a run with --run-id to delete all of its checkpoints."
        )
    for path in args.paths:
        if "/" not in path:
            raise ValidationError(f"{path} may be a run. To delete all checkpoints of a run, write --run-id {path}.")
    client = rest_client(args)
    paths = list(dict.fromkeys(checkpoint_named(client, path) for path in args.paths))  # all, before any is deleted
    if args.run_id:
        run_id = run_named(client, args.run_id).training_run_id
        paths = [saved.tinker_path for saved in client.list_checkpoints(run_id).result().checkpoints]
    if paths and not args.yes and not _is_confirmed(paths):
        output.remark("Nothing was deleted.")
        return 1
    deleted, failed = [], []
    for path, future in [(path, client.delete_checkpoint_from_tinker_path(path)) for path in paths]:
        try:
            future.result()
            deleted.append(path)
        except TinkexError as error:
            failed.append({"path": path, "error": describe(error)})
    if args.output == "json":
        output.write_json({"deleted": deleted, "failed": failed})
    else:
        print(f"Deleted {len(deleted)} of {len(paths)} checkpoints.")
    for failure in failed:
        output.remark(f"tinkex: {failure['path']}: {failure['error']}")
    return 1 if failed else 0


def download(args: argparse.Namespace) -> None:
    from pathlib import Path

    args.path = checkpoint_named(rest_client(args), args.path)
    folder = Path(args.dir) / folder_name(args.path)
    files = download_into(args, args.path, folder, keep_archive=args.keep_archive)
    if args.output == "json":
        sizes = {str(file): file.stat().st_size for file in files}
        output.write_json({"path": args.path, "folder": str(folder), "files": sizes})
    else:
        for file in files:
            print(file)


def download_into(args: argparse.Namespace, path: str, folder: Path, *, keep_archive: bool = False) -> list[Path]:
    """Download a checkpoint's files and show the progress. Called again, it continues where it stopped."""
    import concurrent.futures

    from tinkex.client.download import download_checkpoint
    from tinkex.terminal.progress_bar import ProgressBar

    with ProgressBar() as bar:
        client = rest_client(args)
        future = download_checkpoint(
            client, path, folder, lambda progress: bar.update(*progress), keep_archive=keep_archive
        )
        try:
            while not future.done():
                concurrent.futures.wait([future], LOOK_S)
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            bar.close()
            output.remark("Run the same command again to continue where this one stopped.")
            raise


def folder_name(path: str) -> str:
    """Return run_weights_name: one folder per checkpoint, with a name that is valid on every system."""
    _run_of(path)
    return re.sub(r"[^\w.-]+", "_", path.removeprefix("tinker://"))


def list_pages(
    client: tinkex.RestClient, run_id: str | None, limit: int, total: list[int]
) -> Iterator[tinkex.Checkpoint]:
    """Yield checkpoints, fetched in pages as they are needed. `limit` (0: none) only limits the length of a page.

    `total` gets how many there are, if the service says it.
    """
    if run_id is not None:
        checkpoints = client.list_checkpoints(run_id).result().checkpoints
        total.append(len(checkpoints))
        yield from checkpoints
        return
    length = min(PAGE, limit + 1) if limit else PAGE  # one more than is shown, to know whether there are more
    offset = 0
    while (page := client.list_user_checkpoints(limit=length, offset=offset).result()).checkpoints:
        if page.cursor is not None:
            total.append(page.cursor.total_count)
        yield from page.checkpoints
        offset += len(page.checkpoints)
        if page.cursor is not None and offset >= page.cursor.total_count:
            return


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _run_of(path: str) -> str:
    return tinkex.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id


def _report_change(args: argparse.Namespace, field: str, value: int | None, text: str) -> None:
    if args.output == "json":
        output.write_json({"path": args.path, field: value})
    else:
        print(f"{args.path} {text}.")


def _is_confirmed(paths: list[str]) -> bool:
    if not sys.stdin.isatty():
        raise ValidationError("Deleting needs a confirmation, and stdin is not a terminal: pass -y to confirm.")
    for path in paths:
        output.remark(f"  {clean(path)}")
    sys.stderr.write(f"Delete {'this checkpoint' if len(paths) == 1 else f'these {len(paths)} checkpoints'}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
