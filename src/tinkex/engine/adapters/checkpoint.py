"""Saves and loads adapters: PEFT folders for every tool, snapshots for this service. Safetensors and JSON, no pickle.

    PEFT folder   adapter_model.safetensors, adapter_config.json; ours also have tinkex.json (how the run was made) and,
                  if asked for, optimizer.safetensors
    snapshot      state.safetensors, state.json: all buffers of an adapter; restoring one is exact to the bit

A folder is written under another name, flushed to the disk and renamed, so that it is there complete or not at all.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.adapters.lora import LoraWeights, Role, Site
from tinkex.engine.adapters.tensor_files import FileSum, no_pause, sum_of, write_tensors
from tinkex.engine.contract import LORA_ALPHA, EngineFault, LoraSpec
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.models.registry import adapter_base
from tinkex.engine.proofs import FILE as PROOF

logger = logging.getLogger("tinkex.engine")

WEIGHTS, CONFIG, RUN_CONFIG, MOMENTS = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "tinkex.json",
    "optimizer.safetensors",
)
STATE, STATE_INFO = "state.safetensors", "state.json"

_PREFIX = "base_model.model."
_SYNCED_PARENTS = 4
"""`checkpoints/{run}/{kind}/{name}` has that many folders above it, the data folder included."""
_NAMES_BYTES = 300
"""For the names and shapes of a site's two tensors, in the header of a safetensors file."""


def save(
    adapter: Adapter,
    folder: Path,
    *,
    with_optimizer: bool,
    proof: Mapping[str, Any] | None = None,
    pace: Callable[[], None] = no_pause,
) -> dict[str, FileSum]:
    """Write a PEFT folder. Returns each file's size and checksum. The adapter must not change meanwhile.

    `proof`: what other engines must see in the weights (`engine.proofs`).
    """
    files: dict[str, FileSum] = {}
    with _atomic_folder(folder) as staging:
        tensors = {}
        for site in adapter.sites:
            for letter, tensor in zip("AB", adapter.lora.pairs[site.name], strict=True):
                tensors[f"{_PREFIX}{site.name}.lora_{letter}.weight"] = tensor
        files[WEIGHTS] = write_tensors(staging / WEIGHTS, tensors, metadata={"format": "pt"}, pace=pace)
        if with_optimizer:
            moments = {"exp_avg": adapter.exp_avg_P, "exp_avg_sq": adapter.exp_avg_sq_P}
            files[MOMENTS] = write_tensors(
                staging / MOMENTS, {**moments, "step": torch.tensor(adapter.step)}, pace=pace
            )
        texts = {CONFIG: _peft_config(adapter), RUN_CONFIG: _run_config(adapter), **({PROOF: proof} if proof else {})}
        for name, content in texts.items():
            _write_json(staging / name, content)
            files[name] = sum_of(staging / name)
    return dict(sorted(files.items()))


def expected_bytes(adapter: Adapter, *, with_optimizer: bool) -> int:
    """Return about how large a PEFT folder would be, before it is written: the numbers, and room for names."""
    return adapter.weights_P.nbytes * (3 if with_optimizer else 1) + _NAMES_BYTES * (len(adapter.sites) + 16)


def load(adapter: Adapter, folder: Path, *, with_optimizer: bool, is_upload: bool = False) -> None:
    """Replace an adapter's weights by a folder's; the gradient is cleared.

    A file that cannot be read is the service's fault, because the service wrote it; of an upload, the user's.

    Without `with_optimizer` the optimizer's state stays as it is: fresh moments would make the next step of a run that
    is well on its way as large as its first, in every number (measured: a loss of 26 became 35; with its old moments,
    25).
    """
    model, spec = adapter.model, adapter.spec
    loaded = read_weights(folder, model, is_upload=is_upload)
    if loaded.spec.rank != spec.rank:
        raise EngineFault(
            f"The checkpoint has rank {loaded.spec.rank}, this run has rank {spec.rank}. Create a run of the "
            "checkpoint's rank."
        )
    loaded_sites, run_sites = set(loaded.pairs), {site.name for site in adapter.sites}
    is_ours = (folder / RUN_CONFIG).exists()
    # A folder made by another tool may lack layers; there the run starts with B = 0, which changes nothing.
    if not loaded_sites <= run_sites or (is_ours and loaded_sites != run_sites):
        raise EngineFault(
            f"The checkpoint was trained with {_flags(loaded.spec)}, this run has {_flags(spec)}: they train different "
            "layers. Create a run with the checkpoint's flags."
        )
    is_complete = loaded_sites == run_sites
    moments = _read_moments(adapter, folder, is_complete=is_complete) if with_optimizer else None
    initial_P = adapter.weights_P if is_complete else Adapter(model, spec).weights_P
    with torch.no_grad():
        adapter.weights_P.copy_(initial_P)
        for name, pair in loaded.pairs.items():
            for leaf, value in zip(adapter.lora.pairs[name], pair, strict=True):
                leaf.copy_(value)
        if moments is not None:
            adapter.exp_avg_P.copy_(moments["exp_avg"])
            adapter.exp_avg_sq_P.copy_(moments["exp_avg_sq"])
            adapter.step = int(moments["step"])
    adapter.clear_gradient()


def read_weights(folder: Path | str, model: Model, *, is_upload: bool = False) -> LoraWeights:
    """Read an adapter from a PEFT folder, written by tinkex or another tool, onto this model's device.

    PEFT's factor alpha/r (with rslora alpha/√r) becomes ours, 32/r, by scaling B.
    """
    folder, at_fault = Path(folder), "user" if is_upload else "server"
    config = _read_json(folder / CONFIG, at_fault)
    run_config = _read_json(folder / RUN_CONFIG, at_fault) if (folder / RUN_CONFIG).exists() else {}
    _check_supported(config)
    if run_config and run_config.get("base") not in model.info.names:
        raise EngineFault(
            f"The checkpoint belongs to base model {run_config.get('base')}, not to {model.info.name}. Use it with its "
            "own base model."
        )
    if run_config and run_config.get("source_hash", "") != model.info.source_hash:
        logger.warning(
            "an adapter of %s was trained on files with hash %s, those in use have %s",
            model.info.name,
            run_config.get("source_hash"),
            model.info.source_hash,
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise EngineFault(f"{CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}; both must be numbers, r at least 1.")
    factor = alpha * (math.sqrt(rank) if config.get("use_rslora") else 1.0) / LORA_ALPHA
    pairs = {}
    for site, a_RD, b_OR in _read_pairs(_read_tensors(folder / WEIGHTS, at_fault), rank, model):
        a_RD, b_OR = a_RD.float(), b_OR.float() if factor == 1.0 else b_OR.float() * factor
        # Here and not before: a float64 or a large lora_alpha becomes infinite only as a scaled float32.
        if not bool(a_RD.isfinite().all() and b_OR.isfinite().all()):
            raise EngineFault(f"The adapter's numbers for {site.name} are not all finite.", at_fault)
        pairs[site.name] = (a_RD.to(model.device), b_OR.to(model.device))
    roles = {site.role for site in model.sites if site.name in pairs}
    flags = {role.value: role in roles for role in Role}
    return LoraWeights(LoraSpec(rank=rank, seed=int(run_config.get("seed", 0)), **flags), pairs)


def snapshot(adapter: Adapter, folder: Path, *, pace: Callable[[], None] = no_pause) -> int:
    """Write the complete state of an adapter, which must not change meanwhile. Returns its size in bytes."""
    with _atomic_folder(folder) as staging:
        tensors = adapter.state | ({"gradient": adapter.gradient_P} if adapter.has_gradient else {})
        write_tensors(staging / STATE, tensors, pace=pace, is_hashed=False)
        sites = [list(site) for site in adapter.sites]
        _write_json(staging / STATE_INFO, {**_run_config(adapter), "step": adapter.step, "sites": sites})
        return sum(path.stat().st_size for path in staging.iterdir())


def restore(folder: Path, find_model: Callable[[str], Model]) -> Adapter:
    """Return the adapter of a snapshot, exactly as it was. `find_model` returns a base model by its name."""
    try:
        info, tensors = _read_json(folder / STATE_INFO), _read_tensors(folder / STATE)
    except EngineFault as fault:
        raise EngineFault(f"The run cannot be continued from its snapshot. {fault}", "server") from None
    spec = LoraSpec(**{field.name: info[field.name] for field in fields(LoraSpec)})
    adapter = Adapter(find_model(info["base"]), spec)
    if [list(site) for site in adapter.sites] != info["sites"]:
        raise EngineFault(
            f"The layers of {info['base']} have changed since the run's snapshot was written. Use the same model.",
            "server",
        )
    with torch.no_grad():
        for name, buffer in adapter.state.items():
            buffer.copy_(tensors[name])
        if "gradient" in tensors:
            adapter.gradient_P.copy_(tensors["gradient"])
    adapter.has_gradient = "gradient" in tensors
    adapter.step = info["step"]
    return adapter


def _read_moments(adapter: Adapter, folder: Path, *, is_complete: bool) -> dict[str, Tensor]:
    if not (folder / MOMENTS).exists():
        raise EngineFault("The checkpoint has no optimizer state. Load it with optimizer=False, or save it with one.")
    moments = _read_tensors(folder / MOMENTS)
    shapes = {name: tuple(tensor.shape) for name, tensor in moments.items()}
    flat = tuple(adapter.weights_P.shape)
    if not is_complete or shapes != {"exp_avg": flat, "exp_avg_sq": flat, "step": ()}:
        raise EngineFault("The checkpoint's optimizer state does not fit this run. Load it with optimizer=False.")
    return moments


def _read_pairs(tensors: Mapping[str, Tensor], rank: int, model: Model) -> Iterator[tuple[Site, Tensor, Tensor]]:
    """Yield A and B of every site in a file. Raises if a pair does not fit its layer or the file has other tensors."""
    remaining = dict(tensors)
    for site in model.sites:
        a_RD, b_OR = (remaining.pop(f"{_PREFIX}{site.name}.lora_{letter}.weight", None) for letter in "AB")
        if a_RD is None and b_OR is None:
            continue
        expected = [[rank, site.d_in], [site.d_out, rank]]
        shapes = [None if tensor is None else list(tensor.shape) for tensor in (a_RD, b_OR)]
        if a_RD is None or b_OR is None or shapes != expected:
            raise EngineFault(
                f"The adapter's A and B for {site.name} have shapes {shapes}, {model.info.name} at rank {rank} needs "
                f"{expected}. Is it of another base model?"
            )
        yield site, a_RD, b_OR
    for name, tensor in remaining.items():
        # PEFT adds the frozen embedding to the file of an adapter on the unembedding.
        if not _is_base_weight(name, tensor, model):
            raise EngineFault(f"The adapter has {name!r}, which {model.info.name} has no layer for.")


def _is_base_weight(name: str, tensor: Tensor, model: Model) -> bool:
    own = model.weight(name.replace(".base_layer.", ".").removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    return own is not None and own.shape == tensor.shape and bool(torch.allclose(own.float().cpu(), tensor.float()))


_UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "a bias in LoRA",
    "modules_to_save": "whole modules (modules_to_save)",
    "rank_pattern": "a rank per layer (rank_pattern)",
    "alpha_pattern": "an alpha per layer (alpha_pattern)",
    "trainable_token_indices": "trained token embeddings",
    "layer_replication": "replicated layers",
    "target_parameters": "LoRA on bare parameters",
    "fan_in_fan_out": "transposed layers (fan_in_fan_out)",
    "megatron_config": "Megatron layers",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}


def _check_supported(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise EngineFault(f"The adapter is of type {config.get('peft_type')!r}; only LORA adapters can be used.")
    used = [feature for key, feature in _UNSUPPORTED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        used.append("trained biases")
    if used:
        raise EngineFault(
            f"The adapter uses {', '.join(used)}, which tinkex does not support. Only plain LoRA can be loaded."
        )


def _peft_config(adapter: Adapter) -> dict[str, Any]:
    info, module = adapter.model.info, adapter.model.module
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter_base(info),
        # PEFT warns about unknown keys, so the facts about the base model are put where it ignores them.
        "auto_mapping": {
            "base_model_class": type(module).__name__,
            "parent_library": type(module).__module__,
            "source": info.source,
            "source_hash": info.source_hash,
        },
        "inference_mode": True,
        "r": adapter.spec.rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": _target_modules(adapter),
    }


def _target_modules(adapter: Adapter) -> list[str]:
    """Return short names (`q_proj`), as other tools expect them, if they match exactly our sites; else full paths."""
    names = {site.name for site in adapter.sites}
    short = {name.rpartition(".")[2] for name in names}
    matched = {name for name, _ in adapter.model.module.named_modules() if name.rpartition(".")[2] in short}
    return sorted(short if matched == names else names)


def _run_config(adapter: Adapter) -> dict[str, Any]:
    info = adapter.model.info
    base = {"base": info.name, "source": info.source, "source_hash": info.source_hash}
    return {"format": 1, **base, **asdict(adapter.spec)}


def _flags(spec: LoraSpec) -> str:
    return " ".join(f"{role.value}={str(getattr(spec, role.value)).lower()}" for role in Role)


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into. It is renamed to `folder` at the end, or deleted if an exception is raised."""
    staging, old = folder.with_name(folder.name + ".partial"), folder.with_name(folder.name + ".old")
    try:
        for path in (staging, old):
            shutil.rmtree(path, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        for path in (*staging.iterdir(), staging):
            _fsync(path)
        if folder.exists():  # an operation that runs again after a crash
            os.rename(folder, old)
        os.rename(staging, folder)
        # The folder's name, and those of folders above it that may be as new: up to the data folder.
        for parent in folder.parents[:_SYNCED_PARENTS]:
            _fsync(parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise _write_fault(error) from None
        raise


def _fsync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders; NTFS journals renames itself
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except PermissionError:  # a folder above ours
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_fault(error: OSError | SafetensorError) -> EngineFault:
    logger.error("writing a checkpoint failed: %s", error)
    text = str(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text or "os error 28" in text:
        return EngineFault(
            "The server's disk is full, so nothing was written; the run itself is unharmed. Free some space (delete "
            "checkpoints, or run `tinkex gc`) and try again.",
            "server",
        )
    reason = getattr(error, "strerror", None) or "the disk rejected it"
    return EngineFault(f"The server could not write the files ({reason}); nothing was written. See its log.", "server")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path, at_fault: str = "server") -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineFault(f"The checkpoint has no {path.name}. Was it deleted?") from None
    except (ValueError, RecursionError):
        raise EngineFault(f"The checkpoint's {path.name} is damaged: it is not JSON.", at_fault) from None
    if not isinstance(content, dict):
        raise EngineFault(f"The checkpoint's {path.name} is damaged: it is not a JSON object.", at_fault)
    return content


def _read_tensors(path: Path, at_fault: str = "server") -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise EngineFault(f"The checkpoint has no {path.name}. Was it deleted?") from None
    except (SafetensorError, ValueError) as error:
        if "allocate memory" in str(error).lower():
            raise MemoryError(str(error)) from None
        logger.error("cannot read %s: %s", path, error)
        raise EngineFault(f"The checkpoint's {path.name} is damaged: it is not a safetensors file.", at_fault) from None
