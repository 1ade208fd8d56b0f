"""Reads the data of a pass into tensors and checks them. Pure: no model runs here.

The server has checked the data by the same rules. What would crash the engine or give a wrong number is checked again.

Axes: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import EngineFault, checked
from tinkex.engine.frames import Frame
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training.losses import Config, Loss, find_loss, read_config
from tinkex.engine.training.runner import Item
from tinkex.rules import losses as rules
from tinkex.rules.losses import place
from tinkex.rules.ranges import MAX_TARGETS, check_length, unknown_token_error

_DTYPES = {"int64": ("<i8", np.int64), "float32": ("<f4", np.float32)}


class DenseTensor(NamedTuple):
    """A tensor in dense form. `listed` marks the entries that a sparse one lists; None for one that came dense."""

    values: Tensor
    listed: Tensor | None


def read_items(command: Frame, adapter: Adapter) -> list[Item]:
    """Return the data of a `forward` or `forward_backward`. Raises EngineFault naming the datum and the input."""
    head = command.head
    loss = find_loss(head["loss_fn"])
    config = read_config(loss, head["config"])
    if not head["data"]:
        raise EngineFault(str(rules.no_data_error()))
    total = 0
    for index, row in enumerate(head["data"]):
        is_forward = head["op"] == "forward"
        checked(rules.check_input_names, index, row["inputs"].keys(), loss.name, allows_extra=is_forward)
        total += _dense_size(row["inputs"]["target_tokens"], place(index, "target_tokens"))
        checked(rules.check_total_targets, index, total)
    return [_read_item(index, command, adapter, loss, config) for index in range(len(head["data"]))]


def _read_item(index: int, command: Frame, adapter: Adapter, loss: Loss, config: Config) -> Item:
    row, buffers, model = command.head["data"][index], command.buffers, adapter.model
    tokens_T = torch.from_numpy(np.frombuffer(buffers[row["tokens"]], "<i4").astype(np.int64))
    _check_tokens(tokens_T, f"data[{index}].model_input", model)
    limit = model.info.max_context_length or None
    checked(check_length, f"data[{index}].model_input", len(tokens_T), model.info.name, limit)
    tensors = {
        key: _read_tensor(row["inputs"][key], buffers, place(index, key))
        for key in loss.rule.inputs
        if key in row["inputs"]
    }
    targets = tensors["target_tokens"].values
    _check_targets(targets, len(tokens_T), place(index, "target_tokens"), loss, model)
    inputs = {}
    for key, tensor in tensors.items():
        if key != "target_tokens":
            per_position = rules.is_per_position(loss.rule, key)
            inputs[key] = _as_shape_of(targets, tensor.values, place(index, key), per_position=per_position)
    _add_default_inputs(inputs, targets, tensors, loss)
    low, high = inputs.get("clip_low_threshold"), inputs.get("clip_high_threshold")
    if low is not None and high is not None and bool((low > high).any()):
        raise EngineFault(str(rules.crossed_thresholds_error(index)))
    device = model.device
    return Item(
        adapter=adapter,
        loss=loss,
        config=config,
        needs_gradient=command.head["op"] == "forward_backward",
        index=index,
        tokens_T=tokens_T.to(device),
        targets=targets.to(device),
        inputs={key: value.to(device) for key, value in inputs.items()},
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
        if key in loss.rule.optional and key not in inputs:
            inputs[key] = ones
    if loss.skips_unlisted:
        for key in loss.rule.required:
            if (is_listed := tensors[key].listed) is not None:
                inputs["weights"] = inputs["weights"] * is_listed


def _check_targets(targets: Tensor, length: int, path: str, loss: Loss, model: Model) -> None:
    checked(rules.check_target_dtype, path, str(targets.dtype).removeprefix("torch."))
    checked(rules.check_target_shape, path, targets.shape, length, loss.name)
    checked(rules.check_targets_per_position, path, targets.shape, model.info.name, model.vocab_size)
    _check_tokens(targets, path, model)


def _as_shape_of(targets: Tensor, values: Tensor, path: str, *, per_position: bool) -> Tensor:
    """Return an input in the targets' shape. `per_position`: one value per position is accepted, for all K targets."""
    values = values.float()
    checked(rules.check_shape, path, values.shape, targets.shape, per_position)
    if values.numel() != targets.numel():  # one entry per position
        values = values[:, None].expand(targets.shape)
    not_finite = ~values.isfinite().flatten()
    if bool(not_finite.any()):
        entry = int(not_finite.nonzero()[0])
        raise EngineFault(str(rules.not_finite_error(path, entry, float(values.flatten()[entry]))))
    return values.reshape(targets.shape)


def _check_tokens(tokens: Tensor, path: str, model: Model) -> None:
    unknown = ((tokens < 0) | (tokens >= model.vocab_size)).flatten()
    if bool(unknown.any()):
        entry = int(unknown.nonzero()[0])
        token = int(tokens.flatten()[entry])
        raise EngineFault(str(unknown_token_error(path, entry, token, model.info.name, model.vocab_size)))


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
        raise EngineFault(str(rules.listed_twice_error(path)))
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
