"""Reads the data of a pass into tensors and checks them. Pure: no model runs here.

The server checks data as well. The checks here are for what would crash the engine or give a wrong number.

Axes: B datums, T tokens, K targets of one position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.contract import EngineFault
from tinkex.engine.frames import Frame
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training.losses import Loss

MAX_TARGETS = 2**26
"""Targets of one call; sparse ones count in their dense size. Their log-probabilities are sent back: 256 MB."""

_DTYPES = {"int64": ("<i8", np.int64), "float32": ("<f4", np.float32)}


@dataclass(frozen=True, slots=True)
class DatumTensors:
    """One datum of a pass. `inputs` are those that the loss takes, in float32 and in the shape of the targets."""

    index: int
    tokens_T: Tensor
    targets: Tensor
    """[T] or [T, K]."""
    inputs: Mapping[str, Tensor]


class DenseTensor(NamedTuple):
    """A tensor in dense form. `listed` marks the entries that a sparse one lists; None for one that came dense."""

    values: Tensor
    listed: Tensor | None


def read_data(command: Frame, loss: Loss, model: Model) -> list[DatumTensors]:
    """Return the data of a `forward` or `forward_backward`. Raises EngineFault naming the datum and the input."""
    rows = command.head["data"]
    if not rows:
        raise EngineFault("There is no data. Pass at least one Datum.")
    known = {"target_tokens", *loss.required, *loss.optional}
    total = 0
    for index, row in enumerate(rows):
        # Early clients send the inputs of a custom loss along when they want log-probabilities only.
        if command.head["op"] == "forward_backward" and (unknown := sorted(row["inputs"].keys() - known)):
            raise EngineFault(
                f"{_input_path(index, unknown[0])}: {loss.name} has no such input. It takes "
                f"{', '.join(sorted(known))}. Remove the key."
            )
        total += _dense_size(row["inputs"].get("target_tokens", {}), _input_path(index, "target_tokens"))
        if total > MAX_TARGETS:
            raise EngineFault(
                f"The targets of data[0] to data[{index}] have {total:,} entries, more than {MAX_TARGETS:,} for one "
                "call. Send fewer datums at once, or fewer targets per position."
            )
    return [_read_datum(index, row, command.buffers, loss, model) for index, row in enumerate(rows)]


def pad_tokens(data: Sequence[DatumTensors]) -> Tensor:
    """Return tokens [B, T], padded with zeros on the right. Causal attention never looks there: no mask is needed."""
    return torch.nn.utils.rnn.pad_sequence([datum.tokens_T for datum in data], batch_first=True)


def _read_datum(index: int, row: Mapping[str, Any], buffers: Sequence[Any], loss: Loss, model: Model) -> DatumTensors:
    tokens_T = torch.from_numpy(np.frombuffer(buffers[row["tokens"]], "<i4").astype(np.int64))
    _check_tokens(tokens_T, f"data[{index}].model_input", model)
    limit = model.info.max_context_length
    if limit and len(tokens_T) > limit:
        raise EngineFault(
            f"data[{index}].model_input has {len(tokens_T)} tokens; {model.info.name} takes at most {limit}. Cut it."
        )
    tensors: dict[str, DenseTensor] = {}
    for key in ("target_tokens", *loss.required, *loss.optional):
        if key in row["inputs"]:
            tensors[key] = _read_tensor(row["inputs"][key], buffers, _input_path(index, key))
        elif key not in loss.optional:
            needs = ", ".join(("target_tokens", *loss.required))
            raise EngineFault(f"{_input_path(index, key)} is missing: {loss.name} needs {needs}.")
    targets = tensors["target_tokens"].values
    _check_targets(targets, len(tokens_T), _input_path(index, "target_tokens"), loss, model)
    inputs = {}
    for key in (*loss.required, *loss.optional):
        if key in tensors:
            may_be_1d = loss.weighs_positions and key == "weights"
            path = _input_path(index, key)
            inputs[key] = _as_shape_of(targets, tensors[key].values, path, may_be_1d=may_be_1d)
    _add_default_inputs(inputs, targets, tensors, loss)
    low, high = inputs.get("clip_low_threshold"), inputs.get("clip_high_threshold")
    if low is not None and high is not None and bool((low > high).any()):
        raise EngineFault(
            f"{_input_path(index, 'clip_low_threshold')} is above clip_high_threshold in places. Swap them."
        )
    device = model.device
    return DatumTensors(
        index, tokens_T.to(device), targets.to(device), {key: value.to(device) for key, value in inputs.items()}
    )


def _add_default_inputs(
    inputs: dict[str, Tensor], targets: Tensor, tensors: Mapping[str, DenseTensor], loss: Loss
) -> None:
    """Set absent weights and masks to 1, and weights to 0 where a loss skips entries that are not listed.

    A sparse tensor means the dense one with zeros: clients drop zeros to save bytes, token 0 among them, so there may
    be a weight where no target is listed. Whether an entry is listed matters only for absent weights and for losses
    with `skips_unlisted`.
    """
    listed = tensors["target_tokens"].listed
    ones = torch.ones(targets.shape) if listed is None else listed.float()
    for key in ("weights", "sequence_ratio_mask"):
        if key in loss.optional and key not in inputs:
            inputs[key] = ones
    if loss.skips_unlisted:
        for key in ("target_tokens", *loss.required):
            if (is_listed := tensors[key].listed) is not None:
                inputs["weights"] = inputs["weights"] * is_listed


def _check_targets(targets: Tensor, length: int, path: str, loss: Loss, model: Model) -> None:
    if targets.dtype != torch.int64:
        raise EngineFault(f"{path} is float32; token ids are integers. Pass int64.")
    if targets.ndim not in (1, 2) or len(targets) != length or not targets.numel():
        raise EngineFault(
            f"{path} has shape {list(targets.shape)}, but the model input has {length} tokens. Position t of the "
            "input predicts target t: use model_input = tokens[:-1] and target_tokens = tokens[1:]."
        )
    if targets.ndim == 2 and not loss.takes_2d:
        raise EngineFault(
            f"{path} has shape {list(targets.shape)}, but {loss.name} takes one target per position. Several are for "
            "cross_entropy and kl_divergence."
        )
    _check_tokens(targets, path, model)


def _as_shape_of(targets: Tensor, values: Tensor, path: str, *, may_be_1d: bool) -> Tensor:
    """Return an input in the targets' shape. A flat one of the right size is accepted: early clients send 2-D weights
    that way. `may_be_1d`: one value per position is accepted too, for all K targets of it."""
    values = values.float()
    if may_be_1d and targets.ndim == 2 and values.shape == targets.shape[:1]:
        values = values[:, None].expand(targets.shape)
    if values.numel() != targets.numel() or (values.ndim > 1 and values.shape != targets.shape):
        raise EngineFault(
            f"{path} has shape {list(values.shape)}, but target_tokens has {list(targets.shape)}. Give both the same "
            "shape."
        )
    not_finite = ~values.isfinite().flatten()
    if bool(not_finite.any()):
        entry = int(not_finite.nonzero()[0])
        raise EngineFault(
            f"{path}: entry {entry} is {float(values.flatten()[entry])}. Replace or drop it: a loss needs numbers."
        )
    return values.reshape(targets.shape)


def _check_tokens(tokens: Tensor, path: str, model: Model) -> None:
    if not tokens.numel():
        raise EngineFault(f"{path} is empty. Give it at least one token.")
    unknown = ((tokens < 0) | (tokens >= model.vocab_size)).flatten()
    if bool(unknown.any()):
        entry = int(unknown.nonzero()[0])
        raise EngineFault(
            f"{path}: entry {entry} is {int(tokens.flatten()[entry])}, no token of {model.info.name}, which has "
            f"tokens 0 to {model.vocab_size - 1}. Use this model's own tokenizer."
        )


def _read_tensor(entry: Mapping[str, Any], buffers: Sequence[Any], path: str) -> DenseTensor:
    """Return the tensor of an entry in dense form. Copied once: a buffer may be read-only and its address unaligned."""
    source, dtype = _DTYPES[entry["dtype"]]
    values = np.frombuffer(buffers[entry["data"]], source).astype(dtype)
    size = _dense_size(entry, path)
    if "crow" not in entry:
        shape = entry["shape"] if entry["shape"] is not None else [len(values)]
        if entry["shape"] is not None and len(values) != size:
            raise EngineFault(f"{path}: shape {shape} does not hold {len(values)} values.")
        return DenseTensor(torch.from_numpy(values).reshape(shape), None)
    if size > MAX_TARGETS:
        raise EngineFault(f"{path}: its shape {entry['shape']} has more than {MAX_TARGETS:,} entries.")
    # Sparse tensors are in CSR form: row r has the entries [crow[r], crow[r + 1]) of `col` and `values`.
    crow = np.frombuffer(buffers[entry["crow"]], "<i8")
    col = np.frombuffer(buffers[entry["col"]], "<i8")
    shape = entry["shape"] or []
    is_valid = len(shape) == 2 and len(crow) == shape[0] + 1 and len(col) == len(values)
    is_valid = is_valid and crow[0] == 0 and crow[-1] == len(col) and bool((np.diff(crow) >= 0).all())
    if not is_valid or (len(col) and not 0 <= col.min() <= col.max() < shape[1]):
        raise EngineFault(f"{path}: its sparse indices do not fit its shape {shape} and {len(values)} values.")
    indices = np.repeat(np.arange(shape[0]), np.diff(crow)) * shape[1] + col
    if len(np.unique(indices)) != len(indices):
        raise EngineFault(f"{path}: an entry is listed twice in its sparse indices. List each once.")
    dense, listed = np.zeros(size, dtype), np.zeros(size, bool)
    dense[indices], listed[indices] = values, True
    return DenseTensor(torch.from_numpy(dense).reshape(shape), torch.from_numpy(listed).reshape(shape))


def _dense_size(entry: Mapping[str, Any], path: str) -> int:
    """Return how many numbers the tensor has in dense form; 0 if only its buffer can tell."""
    size = 1
    for extent in entry.get("shape") or [0]:
        if extent < 0:
            raise EngineFault(f"{path}: its shape {entry['shape']} has a negative extent.")
        size *= extent
    return size


def _input_path(index: int, key: str) -> str:
    return f"data[{index}].loss_fn_inputs[{key!r}]"
