"""The data of a pass as tensors, checked. Pure: no model runs here.

The server checks as well; here is checked what would crash the engine or give a wrong number.

Axes: T tokens, K targets of one position.
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

MOST_TARGETS = 2**26
"""Targets of one call, sparse ones counted as if written out: their log-probabilities go back, 256 MB of them."""

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
        raise EngineFault("There is no data. Pass at least one Datum.")
    known = {"target_tokens", *loss.required, *loss.optional}
    total = 0
    for index, row in enumerate(rows):
        # Early clients send the inputs of a loss of their own along when they want log-probabilities alone.
        if command.head["op"] == "forward_backward" and (unknown := sorted(row["inputs"].keys() - known)):
            raise EngineFault(
                f"{_place(index, unknown[0])}: {loss.name} has no such input. It takes {', '.join(sorted(known))}. "
                "Remove the key."
            )
        total += _extent(row["inputs"].get("target_tokens", {}), _place(index, "target_tokens"))
        if total > MOST_TARGETS:
            raise EngineFault(
                f"The targets of data[0] to data[{index}] have {total:,} entries, more than {MOST_TARGETS:,} for one "
                "call. Send fewer datums at once, or fewer targets per position."
            )
    return [_datum(index, row, command.buffers, loss, model) for index, row in enumerate(rows)]


def pad(data: Sequence[Datum]) -> Tensor:
    """Tokens [B, T] with zeros on the right, where causal attention never looks: no mask is needed."""
    return torch.nn.utils.rnn.pad_sequence([datum.tokens_T for datum in data], batch_first=True)


def _datum(index: int, row: Mapping[str, Any], buffers: Sequence[Any], loss: Loss, model: Model) -> Datum:
    tokens_T = torch.from_numpy(np.frombuffer(buffers[row["tokens"]], "<i4").astype(np.int64))
    _check_tokens(tokens_T, f"data[{index}].model_input", model)
    limit = model.info.max_context_length
    if limit and len(tokens_T) > limit:
        raise EngineFault(
            f"data[{index}].model_input has {len(tokens_T)} tokens; {model.info.name} takes at most {limit}. Cut it."
        )
    given: dict[str, Written] = {}
    for key in ("target_tokens", *loss.required, *loss.optional):
        if key in row["inputs"]:
            given[key] = _written(row["inputs"][key], buffers, _place(index, key))
        elif key not in loss.optional:
            needs = ", ".join(("target_tokens", *loss.required))
            raise EngineFault(f"{_place(index, key)} is missing: {loss.name} needs {needs}.")
    targets = _targets(given["target_tokens"], len(tokens_T), _place(index, "target_tokens"), loss, model)
    inputs = {}
    for key in (*loss.required, *loss.optional):
        if key in given:
            by_row = loss.weighs_positions and key == "weights"
            inputs[key] = _like(targets, given[key].values, _place(index, key), by_row=by_row)
    _fill_in(inputs, targets, given, loss)
    low, high = inputs.get("clip_low_threshold"), inputs.get("clip_high_threshold")
    if low is not None and high is not None and bool((low > high).any()):
        raise EngineFault(f"{_place(index, 'clip_low_threshold')} is above clip_high_threshold in places. Swap them.")
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
        if key in loss.optional and key not in inputs:
            inputs[key] = ones
    if loss.skips_unlisted:
        for key in ("target_tokens", *loss.required):
            if (places := given[key].listed) is not None:
                inputs["weights"] = inputs["weights"] * places


def _targets(written: Written, length: int, place: str, loss: Loss, model: Model) -> Tensor:
    targets = written.values
    if targets.dtype != torch.int64:
        raise EngineFault(f"{place} is float32; token ids are integers. Pass int64.")
    if targets.ndim not in (1, 2) or len(targets) != length or not targets.numel():
        raise EngineFault(
            f"{place} has shape {list(targets.shape)}, but the model input has {length} tokens. Position t of the "
            "input predicts target t: use model_input = tokens[:-1] and target_tokens = tokens[1:]."
        )
    if targets.ndim == 2 and not loss.takes_2d:
        raise EngineFault(
            f"{place} has shape {list(targets.shape)}, but {loss.name} takes one target per position. Several are for "
            "cross_entropy and kl_divergence."
        )
    _check_tokens(targets, place, model)
    return targets


def _like(targets: Tensor, values: Tensor, place: str, *, by_row: bool) -> Tensor:
    """An input in the targets' shape. A flat one of the right size will do: early clients send 2-D weights so."""
    values = values.float()
    if by_row and targets.ndim == 2 and values.shape == targets.shape[:1]:
        values = values[:, None].expand(targets.shape)
    if values.numel() != targets.numel() or (values.ndim > 1 and values.shape != targets.shape):
        raise EngineFault(
            f"{place} has shape {list(values.shape)}, but target_tokens has {list(targets.shape)}. Give both the same "
            "shape."
        )
    wrong = ~values.isfinite().flatten()
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise EngineFault(
            f"{place}: entry {at} is {float(values.flatten()[at])}. Replace or drop it: a loss needs numbers."
        )
    return values.reshape(targets.shape)


def _check_tokens(tokens: Tensor, place: str, model: Model) -> None:
    if not tokens.numel():
        raise EngineFault(f"{place} is empty. Give it at least one token.")
    wrong = ((tokens < 0) | (tokens >= model.vocab_size)).flatten()
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise EngineFault(
            f"{place}: entry {at} is {int(tokens.flatten()[at])}, no token of {model.info.name}, which has tokens 0 to "
            f"{model.vocab_size - 1}. Use this model's own tokenizer."
        )


def _written(entry: Mapping[str, Any], buffers: Sequence[Any], place: str) -> Written:
    """The tensor behind an entry, written out. Copied once: a buffer may be read-only and lie at an odd address."""
    source, dtype = _DTYPES[entry["dtype"]]
    values = np.frombuffer(buffers[entry["data"]], source).astype(dtype)
    size = _extent(entry, place)
    if "crow" not in entry:
        shape = entry["shape"] if entry["shape"] is not None else [len(values)]
        if entry["shape"] is not None and len(values) != size:
            raise EngineFault(f"{place}: shape {shape} does not hold {len(values)} values.")
        return Written(torch.from_numpy(values).reshape(shape), None)
    if size > MOST_TARGETS:
        raise EngineFault(f"{place}: its shape {entry['shape']} has more than {MOST_TARGETS:,} entries.")
    crow = np.frombuffer(buffers[entry["crow"]], "<i8")
    col = np.frombuffer(buffers[entry["col"]], "<i8")
    shape = entry["shape"] or []
    is_right = len(shape) == 2 and len(crow) == shape[0] + 1 and len(col) == len(values)
    is_right = is_right and crow[0] == 0 and crow[-1] == len(col) and bool((np.diff(crow) >= 0).all())
    if not is_right or (len(col) and not 0 <= col.min() <= col.max() < shape[1]):
        raise EngineFault(f"{place}: its sparse indices do not fit its shape {shape} and {len(values)} values.")
    places = np.repeat(np.arange(shape[0]), np.diff(crow)) * shape[1] + col
    if len(np.unique(places)) != len(places):
        raise EngineFault(f"{place}: a place is listed twice in its sparse indices. List each once.")
    dense, listed = np.zeros(size, dtype), np.zeros(size, bool)
    dense[places], listed[places] = values, True
    return Written(torch.from_numpy(dense).reshape(shape), torch.from_numpy(listed).reshape(shape))


def _extent(entry: Mapping[str, Any], place: str) -> int:
    """How many numbers the tensor has when written out; 0 if only its buffer can tell."""
    size = 1
    for extent in entry.get("shape") or [0]:
        if extent < 0:
            raise EngineFault(f"{place}: its shape {entry['shape']} has a negative extent.")
        size *= extent
    return size


def _place(index: int, key: str) -> str:
    return f"data[{index}].loss_fn_inputs[{key!r}]"
