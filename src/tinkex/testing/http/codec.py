"""How the scripted service reads training data and writes results, in both dialects.

Written against the messages, not with the client's own codec: a mistake there must not meet the same one here.
Results are made as JSON says them; protobuf is another encoding of the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Any

import orjson

from tinkex.testing.http.messages import Response
from tinkex.testing.model import Array, BadData, Row
from tinkex.wire import tinkex_pb2 as pb

_NO_TOKEN = -1  # stands for each place of an image or of audio


@dataclass(frozen=True, slots=True)
class TrainingInput:
    """A forward or forward_backward request, whichever dialect it came in."""

    model_id: str
    seq_id: int | None
    rows: Iterator[Row]
    """Read when the operation's turn comes: data that do not fit fail that operation, not the request."""
    loss_fn: str
    config: Mapping[str, Any]
    forward_only: bool


def training_input_from_json(body: Mapping[str, Any], forward_only: bool) -> TrainingInput:
    given = body["forward_input" if forward_only else "forward_backward_input"]
    rows = map(_row_from_json, given["data"])
    config = given.get("loss_fn_config") or {}
    return TrainingInput(body["model_id"], body.get("seq_id"), rows, given["loss_fn"], config, forward_only)


def training_input_from_protobuf(content: bytes) -> TrainingInput:
    message = pb.ForwardBackwardRequest.FromString(content)
    rows = map(_row_from_protobuf, message.data)
    config = {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in message.loss_fn_config_v2.items()
    }
    config = {**message.loss_fn_config, **config}
    return TrainingInput(message.model_id, message.seq_id, rows, message.loss_fn, config, message.forward_only)


def tokens_of(chunks: Iterable[Mapping[str, Any]]) -> list[int]:
    """The tokens of a JSON model input; the chunks' kinds show in their shape, as old clients send no `type`."""
    parts: list[Sequence[int]] = []
    for chunk in chunks:
        tokens = chunk.get("tokens")
        if isinstance(tokens, list):
            parts.append(tokens)
        else:
            count = chunk.get("expected_tokens") or tokens or (len(chunk["dmel"]) if "dmel" in chunk else 1)
            parts.append([_NO_TOKEN] * int(count))
    return list(chain.from_iterable(parts))


def _row_from_json(datum: Mapping[str, Any]) -> Row:
    inputs = {name: _array_from_json(tensor) for name, tensor in datum["loss_fn_inputs"].items()}
    return Row(tokens_of(datum["model_input"]["chunks"]), inputs)


def _row_from_protobuf(datum: Any) -> Row:
    tokens: list[int] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") == "encoded_text":
            tokens += _unpack("i", chunk.encoded_text.tokens)
        else:
            tokens += [_NO_TOKEN] * (chunk.image.expected_tokens or len(chunk.dmel.dmel) or 1)
    return Row(tokens, {name: _array_from_protobuf(tensor) for name, tensor in datum.loss_fn_inputs.items()})


def _array_from_json(tensor: Mapping[str, Any]) -> Array:
    values, crow = tensor["data"], tensor.get("sparse_crow_indices")
    shape = tuple(tensor.get("shape") or (len(values),))
    if crow is None:
        return _checked(values, shape)
    return _dense(values, crow, tensor["sparse_col_indices"], shape)


def _array_from_protobuf(tensor: Any) -> Array:
    letter = "q" if tensor.dtype == pb.DTYPE_INT64 else "f"
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        return _dense(_unpack(letter, csr.values), _unpack("q", csr.crow_indices), _unpack("q", csr.col_indices), shape)
    values = _unpack(letter, tensor.dense)
    return _checked(values, shape or (len(values),))


def _checked(values: Sequence[float], shape: tuple[int, ...]) -> Array:
    if math.prod(shape) != len(values):
        raise BadData(f"a tensor of shape {list(shape)} came with {len(values)} values")
    return Array(values, shape)


def _dense(values: Sequence[float], crow: Sequence[int], col: Sequence[int], shape: tuple[int, ...]) -> Array:
    rows, width = shape
    flat: list[float] = [0] * (rows * width)
    for row in range(rows):
        for place in range(crow[row], crow[row + 1]):
            flat[row * width + col[place]] = values[place]
    return Array(flat, shape)


def encode(op: str, result: Any, in_protobuf: bool) -> Response:
    """What an operation found; most results are JSON in both dialects."""
    if in_protobuf and op in ("forward", "forward_backward"):
        return Response(200, _pass_to_protobuf(result), "application/x-protobuf")
    if in_protobuf and op == "asample":
        return Response(200, _sample_to_protobuf(result), "application/x-protobuf")
    return Response(200, orjson.dumps(result))


def _pass_to_protobuf(result: Mapping[str, Any]) -> bytes:
    output = pb.ForwardBackwardOutput(loss_fn_output_type=result["loss_fn_output_type"], metrics=result["metrics"])
    tensors = [entry["logprobs"] for entry in result["loss_fn_outputs"]]
    # Datums of different width cannot share a batched tensor, so each run of equal widths is a record.
    for trailing, run in groupby(tensors, key=lambda tensor: tensor["shape"][1:]):
        packed = [_pack("f", tensor["data"]) for tensor in run]
        offsets = [0, *accumulate(map(len, packed))]
        batched = pb.BatchedTensor(
            data=b"".join(packed), offsets=_pack("q", offsets), dtype=pb.DTYPE_FLOAT32, trailing_shape=trailing
        )
        output.loss_fn_outputs.append(pb.ArrayRecord(fields={"logprobs": batched}, num_datums=len(packed)))
    return bytes(output.SerializeToString())


def _sample_to_protobuf(result: Mapping[str, Any]) -> bytes:
    message = pb.SampleResponse()
    for sequence in result["sequences"]:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence["stop_reason"] == "stop" else pb.STOP_REASON_LENGTH,
            tokens=_pack("i", sequence["tokens"]),
            logprobs=_pack("f", sequence["logprobs"]),
            topk_sampled_logprobs=_topk(sequence["topk_logprobs"]) if "topk_logprobs" in sequence else None,
        )
    if "prompt_logprobs" in result:
        message.prompt_logprobs = _pack("f", [math.nan if lp is None else lp for lp in result["prompt_logprobs"]])
    if "topk_prompt_logprobs" in result:
        message.topk_prompt_logprobs.CopyFrom(_topk(result["topk_prompt_logprobs"]))
    if "target_prompt_logprobs" in result:
        message.target_prompt_logprobs.CopyFrom(_tensor(result["target_prompt_logprobs"]))
    for name, tensor in result.get("prompt_alt_tokens", {}).items():
        getattr(message.prompt_alt_tokens, name).CopyFrom(_tensor(tensor))
    return bytes(message.SerializeToString())


def _tensor(tensor: Mapping[str, Any]) -> Any:
    is_whole = tensor["dtype"] == "int64"
    message = pb.Tensor(dtype=pb.DTYPE_INT64 if is_whole else pb.DTYPE_FLOAT32, shape=tensor["shape"])
    packed = _pack("q" if is_whole else "f", tensor["data"])
    if "sparse_crow_indices" in tensor:
        message.sparse_csr.values = packed
        message.sparse_csr.crow_indices = _pack("q", tensor["sparse_crow_indices"])
        message.sparse_csr.col_indices = _pack("q", tensor["sparse_col_indices"])
    else:
        message.dense = packed
    return message


def _topk(places: Sequence[Sequence[tuple[int, float]] | None]) -> Any:
    k = max((len(place) for place in places if place), default=0)
    filled = [pair for place in places for pair in [*(place or ()), *[(0, -99999.0)] * (k - len(place or ()))]]
    return pb.TopkLogprobs(
        token_ids=_pack("i", [token for token, _ in filled]),
        logprobs=_pack("f", [lp for _, lp in filled]),
        k=k,
        length=len(places),
    )


def _pack(letter: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{letter}", *values)


def _unpack(letter: str, packed: bytes) -> Sequence[Any]:
    return struct.unpack(f"<{len(packed) // struct.calcsize(f'<{letter}')}{letter}", packed)
