"""`tinkex export`: converts a checkpoint into files for other programs: a PEFT adapter, or a merged model."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinkex.cli.connect import rest_client
from tinkex.cli.named import CHECKPOINT, checkpoint_named, is_unknown
from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import add_flags, config_of
from tinkex.errors import NotFoundError, ValidationError
from tinkex.terminal import output
from tinkex.terminal.format import size

WEIGHTS, CONFIG, OURS = "adapter_model.safetensors", "adapter_config.json", "tinkex.json"
MORE = """\
Without --merge, writes the adapter: adapter_model.safetensors and adapter_config.json, as PEFT and
vLLM load them. With --merge, adds the adapter to its base model and writes a Hugging Face folder
(safetensors in float32, config, tokenizer) that needs neither. The merged model is loaded again and
must give the same log-probabilities as base and adapter, or it is discarded. A checkpoint (see
`tinkex checkpoint list`) is downloaded from the service that TINKER_BASE_URL and TINKER_API_KEY
name."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "export", export, about, "tinkex export tinker://RUN/sampler_weights/final --out my-adapter",
        "tinkex export latest --out my-model --merge",
        "tinkex export ./my-adapter --out my-model --merge --base-model Qwen/Qwen3-0.6B", more=MORE,
    )  # fmt: skip
    command.add_argument("source", metavar="PATH|RUN|FOLDER", help=f"a folder with an adapter, or {CHECKPOINT}")
    command.add_argument("--out", metavar="FOLDER", required=True, type=Path, help="where to write; must not exist")
    command.add_argument(
        "--merge", action="store_true", help="merge the adapter into its base model (needs the extra `local`)"
    )
    command.add_argument(
        "--base-model", dest="base", metavar="NAME", help="the base model: a name or a folder (default: the adapter's)"
    )
    add_flags(command, ["cache_dir"])


def export(args: argparse.Namespace) -> None:
    if args.merge:
        from tinkex.local_service import needs_local

        needs_local("Merging")
    reject_existing(args.out)
    with_download = not Path(args.source).expanduser().is_dir() and not args.source.startswith((".", "/", "~"))
    adapter = _downloaded(args) if with_download else Path(args.source).expanduser()
    for name in (WEIGHTS, CONFIG):
        if not (adapter / name).is_file():
            if with_download:
                raise ValidationError(f"The checkpoint has no file {name}: it is not a LoRA adapter.")
            if not adapter.is_dir():
                raise ValidationError(f"{adapter} is neither a tinker:// path nor a folder.")
            raise ValidationError(f"{adapter} has no file {name}. Name a folder with an adapter in PEFT's format.")
    written = _merge(args, adapter) if args.merge else _copy(adapter, args.out)
    if with_download:
        shutil.rmtree(adapter, ignore_errors=True)
    if args.output == "json":
        output.write_json(written)
        return
    for name, size_bytes in written["files"].items():
        print(f"{args.out / name}  {size(size_bytes)}")
    for remark in written["remarks"]:
        output.remark(remark)


def reject_existing(out: Path) -> None:
    """Raise if `out` has content, before anything slow: no file of the user is ever overwritten."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValidationError(f"{out} already exists. Name a new or an empty folder.")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)


def vllm_remark(adapter: Path) -> str | None:
    """Return a warning if vLLM may reject this adapter, else None."""
    if not any(name.endswith("lm_head.lora_A.weight") for name in tensor_names(adapter / WEIGHTS)):
        return None
    return (
        "The adapter changes the unembedding (lm_head), which vLLM supports for a few architectures only. If yours is "
        "not among them, export with --merge, or train with train_unembed=False."
    )


def tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file. Its header is JSON, so no library is needed."""
    with file.open("rb") as content:
        try:
            size = int.from_bytes(content.read(8), "little")
            return [name for name in json.loads(content.read(min(size, 100_000_000))) if name != "__metadata__"]
        except ValueError:
            raise ValidationError(f"{file} is not a valid safetensors file.") from None


def _downloaded(args: argparse.Namespace) -> Path:
    from tinkex.cli.commands.checkpoint import download_into, folder_name

    try:
        path = checkpoint_named(rest_client(args), args.source)
    except (NotFoundError, ValidationError) as error:
        if not is_unknown(error):
            raise
        raise ValidationError(
            f"{args.source} is neither a folder nor a tinker:// path, and no run has this id or name. "
            "`tinkex run list` and `tinkex checkpoint list` show yours."
        ) from None
    if path != args.source:
        output.remark(f"Exporting {path}.")
    # Next to the result, under a name that the same command finds again if this one is interrupted.
    folder: Path = args.out.with_name(f"{args.out.name}.{folder_name(path)[-40:]}.download")
    download_into(args, path, folder)
    return folder


def _copy(adapter: Path, out: Path) -> dict[str, Any]:
    remark = vllm_remark(adapter)
    with _created(out) as unfinished:
        unfinished.mkdir()
        for name in (WEIGHTS, CONFIG):  # not the optimizer's state, nor the files that only tinkex reads
            shutil.copyfile(adapter / name, unfinished / name)
    return {"folder": str(out), "files": _sizes(out), "remarks": [remark] if remark else []}


def _merge(args: argparse.Namespace, adapter: Path) -> dict[str, Any]:
    from tinkex.engine.adapters import export as engine_export
    from tinkex.engine.models.registry import resolve
    from tinkex.terminal.progress_bar import ProgressBar

    name = args.base or base_of(adapter)
    with ProgressBar() as bar:
        info = resolve(name, config_of(args).cache_dir, progress=bar.update)
    output.remark(f"Merging into {info.name}, then comparing log-probabilities …")
    with _created(args.out) as unfinished:
        merged = engine_export.merge(info, adapter, unfinished)
    remarks = [
        f"Log-probabilities of {merged.tokens} positions: merged and base + adapter differ by at most "
        f"{merged.difference:.1e} (allowed {engine_export.TOLERANCE:g}); the adapter changes them by up to "
        f"{merged.effect:.2g}."
    ]
    if merged.is_untied:
        remarks.append("The unembedding is no longer tied to the embedding: the adapter changes only the unembedding.")
    if merged.effect == 0.0:
        remarks.append("The adapter changes nothing. Was it trained?")
    numbers = {"base_model": info.name, "difference": merged.difference, "effect": merged.effect}
    return {"folder": str(args.out), **numbers, "files": _sizes(args.out), "remarks": remarks}


def base_of(adapter: Path) -> str:
    """Return the base model that the adapter's files name."""
    for file, key in ((OURS, "base"), (CONFIG, "base_model_name_or_path")):
        try:
            name = json.loads((adapter / file).read_text(encoding="utf-8")).get(key)
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(name, str) and name:
            if Path(name).is_absolute() and not Path(name).is_dir():
                raise ValidationError(f"The adapter's base model {name} does not exist. Name one with --base-model.")
            return name
    raise ValidationError("The adapter's files do not name its base model. Name one with --base-model.")


@contextmanager
def _created(out: Path) -> Iterator[Path]:
    """Give the path of a folder to write; it becomes `out` when the block has ended without an error."""
    unfinished = out.with_name(out.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
        for file in unfinished.glob("*.safetensors"):  # written for their owner only, whatever the umask
            shutil.copymode(next(unfinished.glob("*config.json")), file)
        if out.is_dir():
            out.rmdir()  # it is empty
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
