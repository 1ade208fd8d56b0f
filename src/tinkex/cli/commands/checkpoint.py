"""`tinkex checkpoint`: saved weights, their names, their life and their files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tinkex.cli.arguments import count, seconds, seconds_or_keep
from tinkex.cli.connect import rest_client
from tinkex.terminal import output
from tinkex.terminal.format import age, aware, clean, date, duration, expiry, size, utc_now
from tinkex.terminal.output import Column

if TYPE_CHECKING:
    import argparse
    import datetime as dt
    from collections.abc import Iterator
    from pathlib import Path

    from tinkex.cli.main import Words
    from tinkex.client.future import APIFuture
    from tinkex.client.rest import RestClient
    from tinkex.types import Checkpoint

PAGE = 1000
LOOK_S = 0.5
"""How soon Ctrl-C is noticed where waiting for a future cannot be interrupted (Windows)."""
COLUMNS = (
    Column("PATH"),
    Column("TYPE"),
    Column("SIZE", is_number=True),
    Column("AGE", is_number=True),
    Column("EXPIRES"),
    Column("PUBLIC"),
)
PATH = "tinker://RUN/weights/0001"
ABOUT_KINDS = """\
There are two kinds. tinker://RUN/weights/NAME is made by save_state and holds the optimizer too:
training goes on from it. tinker://RUN/sampler_weights/NAME is made by save_weights_for_sampler: it
is for sampling (`tinkex chat`, `tinkex sample -m`) and smaller. Both can be downloaded and
exported."""


def add(words: Words, about: str) -> None:
    nouns = words.noun(
        "checkpoint", about, "tinkex checkpoint list", f"tinkex checkpoint info {PATH}",
        f"tinkex checkpoint download {PATH} -d adapters", more=ABOUT_KINDS,
    )  # fmt: skip
    made = nouns.add(
        "list", list_checkpoints, "list saved weights", "tinkex checkpoint list --run-id RUN --limit 0",
        "tinkex checkpoint list --expires-within 2d",
    )  # fmt: skip
    made.add_argument("--run-id", metavar="RUN", help="only those of this training run")
    made.add_argument("--limit", type=count, default=20, metavar="N", help="how many (default 20; 0: all)")
    made.add_argument("--expires-within", type=seconds, metavar="TIME", help="only those gone by then: 3600, 12h, 2d")
    for name, run, about in (
        ("info", info, "show one checkpoint"),
        ("publish", publish, "let everybody read a checkpoint"),
        ("unpublish", unpublish, "keep a checkpoint to yourself again"),
    ):
        made = nouns.add(name, run, about, f"tinkex checkpoint {name} {PATH}")
        made.add_argument("path", metavar="PATH", help="tinker://…")
    made = nouns.add(
        "set-ttl", set_ttl, "let a checkpoint expire, or keep it", f"tinkex checkpoint set-ttl {PATH} 7d",
        f"tinkex checkpoint set-ttl {PATH} keep",
    )  # fmt: skip
    made.add_argument("path", metavar="PATH", help="tinker://…")
    made.add_argument("ttl", metavar="TIME|keep", type=seconds_or_keep, help="from now: 3600, 12h, 7d; keep: for good")
    made = nouns.add(
        "delete", delete, "delete checkpoints, for good", f"tinkex checkpoint delete {PATH}",
        "tinkex checkpoint delete --run-id RUN -y",
    )  # fmt: skip
    made.add_argument("paths", nargs="*", metavar="PATH", help="tinker://…")
    made.add_argument("--run-id", metavar="RUN", help="all checkpoints of this training run")
    made.add_argument("-y", "--yes", action="store_true", help="do not ask")
    made = nouns.add(
        "download", download, "download a checkpoint's files", f"tinkex checkpoint download {PATH} -d adapters",
        more="A download that broke off goes on where it stopped when it is started again. A service that gives no\n"
        "archives is asked for a temporary export, for which a training session is opened and closed.",
    )  # fmt: skip
    made.add_argument("path", metavar="PATH", help="tinker://…")
    made.add_argument("-d", "--dir", default=".", help="where to make the checkpoint's own folder (default: here)")
    made.add_argument("--keep-archive", action="store_true", help="keep the tar file beside what was in it")


def list_checkpoints(args: argparse.Namespace) -> int:
    now = utc_now()
    found: list[Checkpoint] = []
    is_cut = False
    for saved in listed(rest_client(args), args.run_id, args.limit if args.expires_within is None else 0):
        if args.expires_within is not None and not _expires_within(saved, now, args.expires_within):
            continue
        if args.limit and len(found) == args.limit:
            is_cut = True
            break
        found.append(saved)
    if args.output == "json":
        output.write_json({"checkpoints": found})
        return 0
    output.write_table(COLUMNS, [_row(saved, now) for saved in found])
    if is_cut:
        output.remark(f"The first {args.limit}; --limit 0 shows all.")
    return 0


def info(args: argparse.Namespace) -> int:
    from tinkex.errors import APIStatusError, TinkexError

    client = rest_client(args)
    run_id, path = _run_of(args.path), args.path
    saved = next((one for one in client.list_checkpoints(run_id).result().checkpoints if one.tinker_path == path), None)
    if saved is None:
        raise TinkexError(
            f"Run {run_id} has no checkpoint {path}. `tinkex checkpoint list --run-id {run_id}` shows all."
        )
    try:
        weights = client.get_weights_info_by_tinker_path(path).result()
    except APIStatusError:
        weights = None  # services from before 0.6 do not have the call, and not every checkpoint the answer
    if args.output == "json":
        output.write_json({**saved.model_dump(mode="json"), **(weights.model_dump(mode="json") if weights else {})})
        return 0
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
    return 0


def publish(args: argparse.Namespace) -> int:
    return _change(args, rest_client(args).publish_checkpoint_from_tinker_path(args.path), "public", True)


def unpublish(args: argparse.Namespace) -> int:
    return _change(args, rest_client(args).unpublish_checkpoint_from_tinker_path(args.path), "public", False)


def set_ttl(args: argparse.Namespace) -> int:
    future = rest_client(args).set_checkpoint_ttl_from_tinker_path(args.path, args.ttl)
    return _change(args, future, "ttl_seconds", args.ttl)


def delete(args: argparse.Namespace) -> int:
    from tinkex.cli.main import sentence
    from tinkex.errors import TinkexError, ValidationError

    if bool(args.paths) == bool(args.run_id):
        raise ValidationError("Name the checkpoints to delete, or all of one run with --run-id.")
    for path in args.paths:
        _run_of(path)  # a bad path is refused before anything is deleted
    client = rest_client(args)
    paths = list(dict.fromkeys(args.paths))
    if args.run_id:
        paths = [saved.tinker_path for saved in client.list_checkpoints(args.run_id).result().checkpoints]
    if paths and not args.yes and not _is_confirmed(paths):
        output.remark("Nothing was deleted.")
        return 1
    gone, failed = [], []
    for path, future in [(path, client.delete_checkpoint_from_tinker_path(path)) for path in paths]:
        try:
            future.result()
            gone.append(path)
        except TinkexError as problem:
            failed.append({"path": path, "error": sentence(problem)})
    if args.output == "json":
        output.write_json({"deleted": gone, "failed": failed})
    else:
        print(f"Deleted {len(gone)} of {len(paths)} checkpoints.")
    for one in failed:
        output.remark(f"tinkex: {one['path']}: {one['error']}")
    return 1 if failed else 0


def download(args: argparse.Namespace) -> int:
    from pathlib import Path

    folder = Path(args.dir) / folder_name(args.path)
    files = download_into(args, args.path, folder, keep_archive=args.keep_archive)
    if args.output == "json":
        sizes = {str(file): file.stat().st_size for file in files}
        output.write_json({"path": args.path, "folder": str(folder), "files": sizes})
    else:
        for file in files:
            print(file)
    return 0


def download_into(args: argparse.Namespace, path: str, folder: Path, *, keep_archive: bool = False) -> list[Path]:
    """Fetch a checkpoint's files, showing how far it is. The same call goes on where an earlier one stopped."""
    from tinkex.client.download import download_checkpoint
    from tinkex.terminal.progress_bar import ProgressBar

    with ProgressBar() as bar:
        client = rest_client(args)
        future = download_checkpoint(
            client, path, folder, lambda progress: bar.update(*progress), keep_archive=keep_archive
        )
        try:
            while not future.done():
                _wait(future, LOOK_S)
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            bar.close()
            output.remark("Run the same command again to continue where this one stopped.")
            raise


def folder_name(path: str) -> str:
    """run_weights_name: one folder per checkpoint, named so that every system can hold it."""
    import re

    _run_of(path)
    return re.sub(r"[^\w.-]+", "_", path.removeprefix("tinker://"))


def listed(client: RestClient, run_id: str | None, limit: int) -> Iterator[Checkpoint]:
    """Checkpoints page by page, as they are needed; `limit` (0: none) only says how long a page is worth asking for."""
    if run_id is not None:
        yield from client.list_checkpoints(run_id).result().checkpoints
        return
    length = min(PAGE, limit + 1) if limit else PAGE  # one more than is shown, to know whether there are more
    offset = 0
    while (page := client.list_user_checkpoints(limit=length, offset=offset).result()).checkpoints:
        yield from page.checkpoints
        offset += len(page.checkpoints)
        if page.cursor is not None and offset >= page.cursor.total_count:
            return


def _row(saved: Checkpoint, now: dt.datetime) -> tuple[str, ...]:
    return (
        saved.tinker_path,
        str(saved.checkpoint_type),
        size(saved.size_bytes),
        age(saved.time, now),
        expiry(saved.expires_at, now),
        _yes(saved.public),
    )


def _expires_within(saved: Checkpoint, now: dt.datetime, limit_s: int) -> bool:
    return saved.expires_at is not None and (aware(saved.expires_at) - now).total_seconds() <= limit_s


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _run_of(path: str) -> str:
    from tinkex.types import ParsedCheckpointTinkerPath

    return ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id


def _change(args: argparse.Namespace, future: APIFuture[None], field: str, value: int | None) -> int:
    future.result()
    if args.output == "json":
        output.write_json({"path": args.path, field: value})
    elif field == "public":
        print(f"{args.path} is {'public' if value else 'private'} now.")
    else:
        print(f"{args.path} {'is kept for good' if value is None else f'expires in {duration(value, 4)}'}.")
    return 0


def _is_confirmed(paths: list[str]) -> bool:
    from tinkex.errors import ValidationError

    if not sys.stdin.isatty():
        raise ValidationError("Deleting needs a yes: pass -y where nobody can be asked.")
    for path in paths:
        output.remark(f"  {clean(path)}")
    sys.stderr.write(f"Delete {'this checkpoint' if len(paths) == 1 else f'these {len(paths)} checkpoints'}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _wait(future: APIFuture[Any], timeout_s: float) -> None:
    import concurrent.futures

    concurrent.futures.wait([future], timeout_s)
