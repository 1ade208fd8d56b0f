"""Writes prompts, chunks, sampling parameters, datums and tensors as JSON, per dialect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson

from tinkex.errors import ValidationError
from tinkex.types.inputs import (
    Datum,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    room_of,
)
from tinkex.types.packed import unpack
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensor import TensorData
from tinkex.wire.dialect import Dialect
from tinkex.wire.json_codec import dump


def write_prompt(prompt: ModelInput, dialect: Dialect) -> orjson.Fragment:
    """The JSON of a prompt, made once per prompt and dialect: prompts are sampled from many times."""
    return prompt.cached(dialect.value, _as_json if dialect is Dialect.JSON else _as_json_with_types)


def _as_json(model_input: ModelInput) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps({"chunks": [_chunk(chunk, Dialect.JSON) for chunk in model_input.chunks]}))


def _as_json_with_types(model_input: ModelInput) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps({"chunks": [_chunk(chunk, Dialect.PROTO) for chunk in model_input.chunks]}))


def _chunk(chunk: ModelInputChunk, dialect: Dialect) -> dict[str, Any]:
    if isinstance(chunk, EncodedTextChunk):
        fields: dict[str, Any] = {"tokens": unpack("i", chunk.packed())}
        if dialect is Dialect.PROTO or "type" in chunk.model_fields_set:
            fields["type"] = "encoded_text"
        return fields
    if isinstance(chunk, (ImageChunk, ImageAssetPointerChunk)) and dialect is Dialect.PROTO:
        newer = {"height": None, "tokens": None, "width": None, "expected_tokens": room_of(chunk)}
        chunk = chunk.model_copy(update=newer)
    return dump(chunk, dialect)


_PARAMS: tuple[str, ...] = SamplingParams.__match_args__


def write_params(params: SamplingParams, dialect: Dialect) -> dict[str, Any]:
    if dialect is Dialect.JSON:
        given = params.model_fields_set
        return {name: getattr(params, name) for name in _PARAMS if name in given}
    fields: dict[str, Any] = {name: value for name in _PARAMS if (value := getattr(params, name)) is not None}
    # Their defaults are written as whole numbers, for the sake of their reprs.
    fields["temperature"], fields["top_p"] = float(params.temperature), float(params.top_p)
    return fields


def write_data(data: Sequence[Datum]) -> list[dict[str, Any]]:
    """Datums as 0.4.1 sends them, the loss inputs first; the newer dialect has no JSON for them."""
    out = []
    for index, datum in enumerate(data):
        tensors = {
            name: write_tensor(_dense(tensor), f"data[{index}].loss_fn_inputs[{name!r}]")
            for name, tensor in datum.loss_fn_inputs.items()
        }
        # Sent once, as a rule: nothing is kept for a second time.
        out.append({"loss_fn_inputs": tensors, "model_input": _as_json(datum.model_input)})
    return out


def _dense(tensor: TensorData) -> TensorData:
    """Services of this dialect's age know no sparse tensors."""
    if not tensor.is_sparse:
        return tensor
    return TensorData.from_list(tensor.tolist(), key="target_tokens" if tensor.dtype == "int64" else "weights")


def write_tensor(tensor: TensorData, where: str) -> dict[str, Any]:
    """Return a tensor as JSON has it. The numbers become text here, so that no later step walks over them again."""
    values = unpack("q" if tensor.dtype == "int64" else "f", tensor.buffer)
    # A sum of float32 values cannot overflow a double, so it is finite if and only if all of them are.
    if tensor.dtype == "float32" and not math.isfinite(sum(values)):
        raise ValidationError(f"{where} holds NaN or an infinity, which JSON cannot carry. Mask it out before sending.")
    fields: dict[str, Any] = {"data": orjson.Fragment(orjson.dumps(values)), "dtype": tensor.dtype}
    if tensor.shape is not None:
        fields["shape"] = tensor.shape
    if tensor.sparse_crow_indices is not None:
        fields["sparse_crow_indices"] = tensor.sparse_crow_indices
        fields["sparse_col_indices"] = tensor.sparse_col_indices
    return fields
