"""What the journal notes about a pass, so that its step is shown with the right loss (`steps`). Pure.

A client of ours says that a pass belongs to a custom loss, and what the caller's function returned
(`wire.custom_loss`). Official clients say nothing. For them the notes have hashes of the data and of the weights: a
custom loss is a forward, then a forward_backward of the same data with other weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tinkex.errors import ValidationError
from tinkex.rules.losses import TARGETS
from tinkex.server.training.residency import NOTES
from tinkex.store.records import OperationRecord
from tinkex.types.inputs import Datum
from tinkex.types.training import ForwardBackwardInput
from tinkex.wire.custom_loss import CUSTOM, LOSS_HEADER, PASS_HEADER, decode_custom_loss

Notes = Mapping[str, Any]
_HASH_BYTES = 8


def pass_options(batch: ForwardBackwardInput, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a pass whose data were checked. Raises ValidationError if a header cannot be read."""
    return {NOTES: {"loss_fn": batch.loss_fn, **_notes(batch, headers)}}


def optimizer_options(params: Mapping[str, float], defaults: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of an optim_step: its settings that are not the usual ones; the learning rate is a metric."""
    unusual = {name: value for name, value in params.items() if name != "learning_rate" and value != defaults[name]}
    return {NOTES: {"optimizer": unusual}} if unusual else None


def loss_function(rows: Sequence[OperationRecord], hidden: set[int]) -> str | None:
    """Return the name of the loss that a step was trained with; "custom" is a function of the caller's program."""
    passes = [row for row in rows if row.kind == "forward_backward"]
    if any(row.seq_id in hidden for row in passes):
        return "custom"
    return next((str(name) for row in reversed(passes) if (name := notes_of(row).get("loss_fn"))), None)


def _notes(batch: ForwardBackwardInput, headers: Mapping[str, str]) -> dict[str, Any]:
    loss, kind = headers.get(LOSS_HEADER), headers.get(PASS_HEADER)
    if kind not in (None, CUSTOM):
        raise ValidationError(f"The header {PASS_HEADER} is {kind[:50]!r}; {CUSTOM!r} is known.", "bad_pass_kind")
    if kind is None and loss is not None:
        raise ValidationError(f"The header {LOSS_HEADER} needs {PASS_HEADER}: {CUSTOM}.", "bad_custom_loss")
    if kind is not None:
        return {"pass": CUSTOM, **({} if loss is None else {"custom_loss": decode_custom_loss(loss)})}
    if batch.loss_fn != "cross_entropy":
        return {}
    is_signed = any(_has_negative(datum) for datum in batch.data)
    hashes = {"data": _hash(_data_of(batch.data)), "weights": _hash(_weights_of(batch.data))}
    return {**hashes, "is_signed": True} if is_signed else hashes


def notes_of(row: OperationRecord) -> Notes:
    notes = row.options.get(NOTES)
    return notes if isinstance(notes, Mapping) else {}


def surrogates(rows: Sequence[OperationRecord]) -> set[int]:
    """Return the numbers of the passes that compute a custom loss: their own loss is neither loss nor evaluation.

    `rows` are those of one step.
    """
    found, forwards = set[int](), dict[str, OperationRecord]()
    is_behind = False
    for row in rows:
        notes = notes_of(row)
        if notes.get("pass") == CUSTOM:
            found.add(row.seq_id)
        elif row.kind == "forward":
            if is_behind:  # the forwards before the last forward_backward are over
                forwards, is_behind = {}, False
            if "data" in notes:
                forwards[notes["data"]] = row
        elif row.kind == "forward_backward":
            is_behind = True
            first = forwards.get(notes.get("data", ""))
            if first is not None and notes_of(first).get("weights") != notes.get("weights"):
                found |= {first.seq_id, row.seq_id}
            elif notes.get("is_signed"):  # a mean over weights of both signs is no loss
                found.add(row.seq_id)
    return found


def custom_loss(row: OperationRecord) -> Notes | None:
    """Return what the caller's function returned, `{"loss", "metrics"}`, if the pass carried it."""
    returned = notes_of(row).get("custom_loss")
    return returned if isinstance(returned, Mapping) else None


def _data_of(data: Sequence[Datum]) -> Iterable[bytes | memoryview]:
    for datum in data:
        for chunk in datum.model_input.chunks:
            yield chunk.packed()  # type: ignore[union-attr]  # checked: all are text
        yield datum.loss_fn_inputs[TARGETS].buffer


def _weights_of(data: Sequence[Datum]) -> Iterable[bytes | memoryview]:
    for datum in data:
        weights = datum.loss_fn_inputs.get("weights")
        yield b"" if weights is None else weights.buffer


def _has_negative(datum: Datum) -> bool:
    weights = datum.loss_fn_inputs.get("weights")
    return weights is not None and bool((np.frombuffer(weights.buffer, "<f4") < 0).any())


def _hash(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    for part in parts:
        digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
