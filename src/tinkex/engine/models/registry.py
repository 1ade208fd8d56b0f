"""Resolves the name of a base model to a local folder and its `ModelInfo`: built-in, folder, cache or hub. No torch.

Names come from the command line and from the service's owner, never from another client. A model in a cache is used
without asking the network, so that a restarted service trains on the same weights.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinkex.clock import REAL
from tinkex.engine.contract import ModelInfo, first_line
from tinkex.engine.models import hub, smollm2, tiny
from tinkex.engine.models.hub import ProgressReport
from tinkex.errors import ConfigError, MissingExtra

logger = logging.getLogger("tinkex.engine")

SOURCE_FILE = "tinkex_source.json"
ABANDONED_S = 24 * 3600.0
"""Age at which an unfinished folder is deleted. A day, because a slow download may still be writing to it."""

INSTEAD = (
    f"Give a folder with config.json, safetensors and tokenizer.json, or a built-in: {tiny.NAME}, {smollm2.ALIAS}."
)


def resolve(
    name: str, cache_dir: Path, *, progress: ProgressReport | None = None, may_download: bool = True
) -> ModelInfo:
    """Find a base model; download or create it if necessary. Raises ConfigError that says what to do if it cannot.

    Without `may_download`, one that is not on this machine is an error, too.
    """
    report = progress or (lambda activity, done, total: None)
    try:
        return _resolve(name, Path(cache_dir) / "models", report if may_download else None)
    except ModuleNotFoundError as missing:
        if isinstance(missing, MissingExtra):
            raise
        raise MissingExtra(f"Serving a model (module {missing.name})", "local") from None


def adapter_base(info: ModelInfo) -> str:
    """Return what PEFT records as an adapter's base model: a hub name only if the hub has exactly these weights."""
    return info.name if info.source == "hub" else info.folder


def _resolve(name: str, models_dir: Path, progress: ProgressReport | None) -> ModelInfo:
    if name == tiny.NAME:
        target = models_dir / f"{name.replace('/', '--')}-{tiny.VERSION}"
        _create(target, {"source": "built-in"}, tiny.write)
        return _describe(target, name)
    if name in (smollm2.NAME, smollm2.ALIAS):
        return _resolve_smollm2(models_dir, progress)
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        folder = path.resolve()
        return _describe(folder, folder.name, (name,) if name != folder.name else ())
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        reason = "has no config.json" if path.is_dir() else "is neither a folder nor a model name"
        raise ConfigError(f"Base model {name!r} {reason}. {INSTEAD}")
    return _from_hub(name, (), progress)


def _resolve_smollm2(models_dir: Path, progress: ProgressReport | None) -> ModelInfo:
    target = models_dir / f"{smollm2.NAME.replace('/', '--')}-gguf"
    aliases = (smollm2.ALIAS,)
    # Once created it stays the base: otherwise adapters trained on it would get other weights after a restart.
    if not target.is_dir():
        try:
            return _from_hub(smollm2.NAME, aliases, progress)
        except ConfigError as error:
            if progress is None:
                raise _not_here(smollm2.ALIAS) from None
            logger.info("%s Using the GGUF of %s %s instead.", error, smollm2.PACKAGE, smollm2.VERSION)
        origin = {"source": "gguf", "sha256": smollm2.GGUF_SHA256, "package": f"{smollm2.PACKAGE}=={smollm2.VERSION}"}
        report = progress
        _create(target, origin, lambda folder: smollm2.write(folder, report))
    info = _describe(target, smollm2.NAME, aliases)
    logger.info(
        "%s: not the hub's weights, but %s %s (4 bits, converted to float32).", info.name, info.source, info.source_hash
    )
    return info


def _from_hub(name: str, aliases: tuple[str, ...], progress: ProgressReport | None) -> ModelInfo:
    folder = hub.find_cached(name)
    if folder is None or _unusable_reason(folder) is not None:
        if progress is None:
            raise _not_here(name)
        try:
            folder = hub.download(name, progress)
        except hub.HubUnreachable as error:
            raise ConfigError(
                f"{name} is not in the cache, and the model hub cannot be reached ({error}). {INSTEAD}"
            ) from None
    return _describe(folder, name, aliases, {"source": "hub", "sha256": folder.name})


def _not_here(name: str) -> ConfigError:
    return ConfigError(f"Base model {name!r} is not on this machine. Fetch it first: tinkex models pull {name}")


def _create(target: Path, origin: dict[str, str], write: Callable[[Path], None]) -> None:
    """Write a model's folder so that it is there complete or not at all, even if another process writes it too."""
    if target.is_dir():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(target)
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


def _delete_abandoned(target: Path) -> None:
    """Delete old unfinished folders that killed processes left behind."""
    for unfinished in target.parent.glob(f".{target.name}-*"):
        with suppress(FileNotFoundError):  # another process has just finished it
            if REAL.wall() - unfinished.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(unfinished, ignore_errors=True)


def _describe(
    folder: Path, name: str, aliases: tuple[str, ...] = (), origin: dict[str, str] | None = None
) -> ModelInfo:
    """Return the `ModelInfo` of a folder. Raises ConfigError if it cannot be served."""
    reason = _unusable_reason(folder)
    if reason is not None:
        raise ConfigError(f"Base model {name!r}: the folder {reason}")
    config, generation = _read_json(folder, "config.json"), _read_json(folder, "generation_config.json")
    if origin is None:
        origin = _read_json(folder, SOURCE_FILE)
        # Only the sources that `_create` writes count: a folder cannot claim to be the hub's.
        if origin.get("source") not in ("built-in", "gguf"):
            origin = {}
    text = config.get("text_config") or config
    if "vocab_size" not in text or "max_position_embeddings" not in text:
        # A configuration may leave out its architecture's defaults; transformers knows them.
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
        hidden_size=_hidden_size(text),
        end_tokens=tuple(ends if isinstance(ends, list) else () if ends is None else (ends,)),
        parameters=_parameters(folder),
    )


def _parameters(folder: Path) -> int:
    """Return how many numbers the weights are, from the heads of the files; 0 if one cannot be read."""
    count = 0
    try:
        for file in folder.glob(hub.WEIGHTS):
            with file.open("rb") as weights:
                head = json.loads(weights.read(int.from_bytes(weights.read(8), "little")))
            count += sum(math.prod(entry["shape"]) for name, entry in head.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
        return 0  # whoever loads the file says what is wrong with it
    return count


def _hidden_size(config: dict[str, Any]) -> int:
    """Return the width of the layers under any of its three usual names; 0 if the configuration has none."""
    return int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)


def _unusable_reason(folder: Path) -> str | None:
    """Return why a folder cannot be served, as the end of a sentence, or None if it can."""
    if not (folder / "config.json").is_file():
        return "has no config.json."
    if (folder / "model.safetensors.index.json").is_file():
        parts = set(_read_json(folder, "model.safetensors.index.json").get("weight_map", {}).values())
        missing = sorted(part for part in parts if not (folder / part).is_file())
        if missing:
            return f"lacks {len(missing)} of {len(parts)} parts of the weights ({missing[0]}). Copy or fetch it again."
    elif not (folder / "model.safetensors").is_file():
        if any(path.suffix in (".bin", ".pt", ".pth") for path in folder.iterdir()):
            return (
                "has pickled weights only, and loading them could run any code. If you trust them, convert "
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
        needed = {key: text[key] for key in ("vocab_size", "max_position_embeddings", "eos_token_id")}
        return {**needed, "hidden_size": _hidden_size(text)}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"Base model {name!r}: transformers cannot tell its vocabulary and context from config.json "
            f"({first_line(error, 200)}). Choose a causal language model that it supports."
        ) from None


def _read_json(folder: Path, file: str) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is no such file."""
    try:
        content = json.loads((folder / file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} of the model in folder {folder.name!r} cannot be read: {error}.") from None
    return content if isinstance(content, dict) else {}
