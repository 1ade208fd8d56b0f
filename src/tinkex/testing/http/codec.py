"""How the scripted service reads training data and writes results, in both dialects.

Written against the messages, not with the client's own codec: a mistake there must not meet the same one here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tinkex.testing.draw import Csr, Draw, Ranked
from tinkex.testing.model import Array, BadData, Pass, Row
from tinkex.wire import tinkex_pb2 as pb

_NO_TOKEN = -1  # stands for each place of an image or of audio


@dataclass(frozen=True, slots=True)
class TrainingInput:
    """A forward or forward_backward request, whichever dialect it came in."""

    model_id: str
    seq_id: int | None
    rows: Callable[[], list[Row]]
    """Read when the operation's turn comes: data that do not fit fail that operation, not the request."""
    loss_fn: str
    config: Mapping[str, object]
    forward_only: bool


def training_input_from_json(body: Mapping[str, Any], forward_only: bool) -> TrainingInput:
    given = body["forward_input" if forward_only else "forward_backward_input"]

    def rows() -> list[Row]:
        return [
            Row(
                tokens_of(datum["model_input"]["chunks"]),
                {name: _array_from_json(tensor) for name, tensor in datum["loss_fn_inputs"].items()},
            )
            for datum in given["data"]
        ]

    config = given.get("loss_fn_config") or {}
    return TrainingInput(body["model_id"], body.get("seq_id"), rows, given["loss_fn"], config, forward_only)


def training_input_from_protobuf(content: bytes) -> TrainingInput:
    message = pb.ForwardBackwardRequest.FromString(content)

    def rows() -> list[Row]:
        return [
            Row(
                _tokens_from_protobuf(datum.model_input),
                {name: _array_from_protobuf(tensor) for name, tensor in datum.loss_fn_inputs.items()},
            )
            for datum in message.data
        ]

    config: dict[str, object] = {
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
    return list(parts[0]) if len(parts) == 1 else list(chain.from_iterable(parts))


def _tokens_from_protobuf(chunks: Iterable[Any]) -> list[int]:
    tokens: list[int] = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") == "encoded_text":
            tokens += _unpack("i", chunk.encoded_text.tokens)
        else:
            tokens += [_NO_TOKEN] * (chunk.image.expected_tokens or len(chunk.dmel.dmel) or 1)
    return tokens


def _array_from_json(tensor: Mapping[str, Any]) -> Array:
    values = tensor["data"]
    shape = tuple(tensor.get("shape") or (len(values),))
    if tensor.get("sparse_crow_indices") is None:
        return _checked(values, shape)
    return _dense(values, Csr(tensor["sparse_crow_indices"], tensor["sparse_col_indices"]), shape)


def _array_from_protobuf(tensor: Any) -> Array:
    letter = "q" if tensor.dtype == pb.DTYPE_INT64 else "f"
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        return _dense(
            _unpack(letter, csr.values), Csr([*_unpack("q", csr.crow_indices)], [*_unpack("q", csr.col_indices)]), shape
        )
    values = _unpack(letter, tensor.dense)
    return _checked(values, shape or (len(values),))


def _checked(values: Sequence[float], shape: tuple[int, ...]) -> Array:
    size = 1
    for axis in shape:
        size *= axis
    if size != len(values):
        raise BadData(f"a tensor of shape {list(shape)} came with {len(values)} values")
    return Array(values, shape)


def _dense(values: Sequence[float], csr: Csr, shape: tuple[int, ...]) -> Array:
    rows, width = shape
    flat: list[float] = [0] * (rows * width)
    for row in range(rows):
        for place in range(csr.crow[row], csr.crow[row + 1]):
            flat[row * width + csr.col[place]] = values[place]
    return Array(flat, shape)


def pass_to_json(found: Pass) -> dict[str, Any]:
    outputs = [{"logprobs": _tensor_to_json(array, "float32")} for array in found.logprobs]
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": {"loss:sum": found.loss}}


def pass_to_protobuf(found: Pass) -> bytes:
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": found.loss})
    # Datums of different width cannot share a batched tensor, so each run of equal widths is a record.
    start = 0
    while start < len(found.logprobs):
        trailing = found.logprobs[start].shape[1:]
        end = start
        while end < len(found.logprobs) and found.logprobs[end].shape[1:] == trailing:
            end += 1
        packed = [_pack("f", array.values) for array in found.logprobs[start:end]]
        offsets = [0]
        for piece in packed:
            offsets.append(offsets[-1] + len(piece))
        tensor = pb.BatchedTensor(
            data=b"".join(packed), offsets=_pack("q", offsets), dtype=pb.DTYPE_FLOAT32, trailing_shape=trailing
        )
        output.loss_fn_outputs.append(pb.ArrayRecord(fields={"logprobs": tensor}, num_datums=end - start))
        start = end
    return bytes(output.SerializeToString())


def draw_to_json(found: Draw) -> dict[str, Any]:
    sequences = []
    for drawn in found.sequences:
        sequence = {"stop_reason": drawn.stop_reason, "tokens": drawn.tokens, "logprobs": drawn.logprobs}
        if drawn.topk is not None:
            sequence["topk_logprobs"] = drawn.topk
        sequences.append(sequence)
    answer: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if found.prompt_logprobs is not None:
        answer["prompt_logprobs"] = found.prompt_logprobs
    if found.topk_prompt is not None:
        answer["topk_prompt_logprobs"] = found.topk_prompt
    if found.target_prompt is not None:
        array, csr = found.target_prompt
        layout = {} if csr is None else {"sparse_crow_indices": csr.crow, "sparse_col_indices": csr.col}
        answer["target_prompt_logprobs"] = {**_tensor_to_json(array, "float32"), **layout}
    if found.alternatives is not None:
        tokens, logprobs = found.alternatives
        answer["prompt_alt_tokens"] = {
            "tokens": _tensor_to_json(tokens, "int64"),
            "logprobs": _tensor_to_json(logprobs, "float32"),
        }
    return answer


def draw_to_protobuf(found: Draw) -> bytes:
    answer = pb.SampleResponse()
    for drawn in found.sequences:
        answer.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if drawn.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=_pack("i", drawn.tokens),
            logprobs=_pack("f", drawn.logprobs),
            topk_sampled_logprobs=None if drawn.topk is None else _topk(drawn.topk),
        )
    if found.prompt_logprobs is not None:
        nan = float("nan")
        answer.prompt_logprobs = _pack("f", [nan if lp is None else lp for lp in found.prompt_logprobs])
    if found.topk_prompt is not None:
        answer.topk_prompt_logprobs.CopyFrom(_topk(found.topk_prompt))
    if found.target_prompt is not None:
        answer.target_prompt_logprobs.CopyFrom(_tensor(*found.target_prompt))
    if found.alternatives is not None:
        tokens, logprobs = found.alternatives
        answer.prompt_alt_tokens.tokens.CopyFrom(
            pb.Tensor(dense=_pack("q", tokens.values), dtype=pb.DTYPE_INT64, shape=tokens.shape)
        )
        answer.prompt_alt_tokens.logprobs.CopyFrom(_tensor(logprobs, None))
    return bytes(answer.SerializeToString())


def _tensor(array: Array, csr: Csr | None) -> Any:
    packed = _pack("f", array.values)
    if csr is None:
        return pb.Tensor(dense=packed, dtype=pb.DTYPE_FLOAT32, shape=array.shape)
    sparse = pb.SparseCsr(values=packed, crow_indices=_pack("q", csr.crow), col_indices=_pack("q", csr.col))
    return pb.Tensor(sparse_csr=sparse, dtype=pb.DTYPE_FLOAT32, shape=array.shape)


def _topk(places: Sequence[Ranked | None]) -> Any:
    k = max((len(place) for place in places if place), default=0)
    filled = [pair for place in places for pair in [*(place or ()), *[(0, -99999.0)] * (k - len(place or ()))]]
    return pb.TopkLogprobs(
        token_ids=_pack("i", [token for token, _ in filled]),
        logprobs=_pack("f", [lp for _, lp in filled]),
        k=k,
        length=len(places),
    )


def _tensor_to_json(array: Array, dtype: str) -> dict[str, Any]:
    return {"data": array.values, "dtype": dtype, "shape": array.shape}


def _pack(letter: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{letter}", *values)


def _unpack(letter: str, packed: bytes) -> Sequence[Any]:
    return struct.unpack(f"<{len(packed) // struct.calcsize(f'<{letter}')}{letter}", packed)
