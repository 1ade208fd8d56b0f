"""Reads the data of a pass as tensors. Pure: no model runs here.

The server has checked the data by the same rules; here is checked again what would crash the engine or give a wrong
number.

Axes: T tokens, K targets of one position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.contract import EngineFault, checked
from tinkex.engine.frames import Frame
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.training.losses import Loss
from tinkex.rules import losses as rules
from tinkex.rules.limits import MAX_TARGETS, check_length, unknown_token_error
from tinkex.rules.losses import place

_DTYPES = {"int64": ("<i8", np.int64), "float32": ("<f4", np.float32)}


@dataclass(frozen=True, slots=True)
class Datum:
    """One datum of a pass. Its inputs are those that the loss takes, in float32 and in the shape of the targets."""

    index: int
    tokens_T: Tensor
    targets: Tensor
    """[T] or [T, K]."""
    inputs: Mapping[str, Tensor]


class Written(NamedTuple):
    """A tensor written out. `listed` is where a sparse one has entries, None for a dense one."""

    values: Tensor
    listed: Tensor | None


def read(command: Frame, loss: Loss, model: Model) -> list[Datum]:
    """The data of a `forward` or `forward_backward`. Raises EngineFault naming the datum and the input."""
    rows = command.head["data"]
    if not rows:
        raise EngineFault(str(rules.no_data_error()))
    total = 0
    for index, row in enumerate(rows):
        is_forward = command.head["op"] == "forward"
        checked(rules.check_input_names, index, row["inputs"].keys(), loss.name, allows_extra=is_forward)
        total += _extent(row["inputs"]["target_tokens"], place(index, "target_tokens"))
        checked(rules.check_total_targets, index, total)
    return [_datum(index, row, command.buffers, loss, model) for index, row in enumerate(rows)]


def pad(data: Sequence[Datum]) -> Tensor:
    """Tokens [B, T] with zeros on the right, where causal attention never looks: no mask is needed."""
    return torch.nn.utils.rnn.pad_sequence([datum.tokens_T for datum in data], batch_first=True)


def _datum(index: int, row: Mapping[str, Any], buffers: Sequence[Any], loss: Loss, model: Model) -> Datum:
    tokens_T = torch.from_numpy(np.frombuffer(buffers[row["tokens"]], "<i4").astype(np.int64))
    _check_tokens(tokens_T, f"data[{index}].model_input", model)
    limit = model.info.max_context_length or None
    checked(check_length, f"data[{index}].model_input", len(tokens_T), model.info.name, limit)
    rule = loss.rule
    given = {
        key: _written(row["inputs"][key], buffers, place(index, key)) for key in rule.inputs if key in row["inputs"]
    }
    targets = _targets(given["target_tokens"], len(tokens_T), place(index, "target_tokens"), loss, model)
    inputs = {}
    for key, written in given.items():
        if key != "target_tokens":
            per_position = rules.is_per_position(rule, key)
            inputs[key] = _like(targets, written.values, place(index, key), per_position=per_position)
    _fill_in(inputs, targets, given, loss)
    low, high = inputs.get("clip_low_threshold"), inputs.get("clip_high_threshold")
    if low is not None and high is not None and bool((low > high).any()):
        raise EngineFault(str(rules.crossed_thresholds_error(index)))
    device = model.device
    return Datum(
        index, tokens_T.to(device), targets.to(device), {key: value.to(device) for key, value in inputs.items()}
    )


def _fill_in(inputs: dict[str, Tensor], targets: Tensor, given: Mapping[str, Written], loss: Loss) -> None:
    """Absent weights and masks count 1.

    A sparse tensor is the dense one with zeros in it: clients drop zeros to save bytes, token 0 among them, so a weight
    may stand where no target is listed. Only absent weights, and losses that say so, go by what is listed.
    """
    listed = given["target_tokens"].listed
    ones = torch.ones(targets.shape) if listed is None else listed.float()
    for key in ("weights", "sequence_ratio_mask"):
        if key in loss.rule.optional and key not in inputs:
            inputs[key] = ones
    if loss.skips_unlisted:
        for key in loss.rule.required:
            if (listed := given[key].listed) is not None:
                inputs["weights"] = inputs["weights"] * listed


def _targets(written: Written, length: int, where: str, loss: Loss, model: Model) -> Tensor:
    targets = written.values
    checked(rules.check_target_dtype, where, str(targets.dtype).removeprefix("torch."))
    checked(rules.check_target_shape, where, targets.shape, length, loss.name)
    _check_tokens(targets, where, model)
    return targets


def _like(targets: Tensor, values: Tensor, where: str, *, per_position: bool) -> Tensor:
    """Return an input in the targets' shape."""
    values = values.float()
    checked(rules.check_shape, where, values.shape, targets.shape, per_position)
    if values.numel() != targets.numel():  # one entry per position
        values = values[:, None].expand(targets.shape)
    wrong = ~values.isfinite().flatten()
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise EngineFault(str(rules.not_finite_error(where, position, float(values.flatten()[position]))))
    return values.reshape(targets.shape)


def _check_tokens(tokens: Tensor, where: str, model: Model) -> None:
    wrong = ((tokens < 0) | (tokens >= model.vocab_size)).flatten()
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        token = int(tokens.flatten()[position])
        raise EngineFault(str(unknown_token_error(where, position, token, model.info.name, model.vocab_size)))


def _written(entry: Mapping[str, Any], buffers: Sequence[Any], where: str) -> Written:
    """The tensor behind an entry, written out. Copied once: a buffer may be read-only and lie at an odd address."""
    source, dtype = _DTYPES[entry["dtype"]]
    values = np.frombuffer(buffers[entry["data"]], source).astype(dtype)
    size = _extent(entry, where)
    if "crow" not in entry:
        shape = entry["shape"] if entry["shape"] is not None else [len(values)]
        if entry["shape"] is not None and len(values) != size:
            raise EngineFault(f"{where}: shape {shape} does not hold {len(values)} values.")
        return Written(torch.from_numpy(values).reshape(shape), None)
    if size > MAX_TARGETS:
        raise EngineFault(f"{where}: its shape {entry['shape']} has more than {MAX_TARGETS:,} entries.")
    crow = np.frombuffer(buffers[entry["crow"]], "<i8")
    col = np.frombuffer(buffers[entry["col"]], "<i8")
    shape = entry["shape"] or []
    is_right = len(shape) == 2 and len(crow) == shape[0] + 1 and len(col) == len(values)
    is_right = is_right and crow[0] == 0 and crow[-1] == len(col) and bool((np.diff(crow) >= 0).all())
    if not is_right or (len(col) and not 0 <= col.min() <= col.max() < shape[1]):
        raise EngineFault(f"{where}: its sparse indices do not fit its shape {shape} and {len(values)} values.")
    positions = np.repeat(np.arange(shape[0]), np.diff(crow)) * shape[1] + col
    if len(np.unique(positions)) != len(positions):
        raise EngineFault(str(rules.listed_twice_error(where)))
    dense, listed = np.zeros(size, dtype), np.zeros(size, bool)
    dense[positions], listed[positions] = values, True
    return Written(torch.from_numpy(dense).reshape(shape), torch.from_numpy(listed).reshape(shape))


def _extent(entry: Mapping[str, Any], where: str) -> int:
    """How many numbers the tensor has when written out; 0 if only its buffer can tell."""
    size = 1
    for extent in entry.get("shape") or [0]:
        if extent < 0:
            raise EngineFault(f"{where}: its shape {entry['shape']} has a negative extent.")
        size *= extent
    return size
