"""How the scripted service reads training data and writes results in protobuf.

Written against the messages, not with the client's own codec: a mistake there must not meet the same one here.
The service computes with what JSON says; protobuf is another encoding of the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

from tinkex.wire import tinkex_pb2 as pb


def training_from_protobuf(content: bytes) -> dict[str, Any]:
    """A forward or forward_backward request, as JSON says it."""
    message = pb.ForwardBackwardRequest.FromString(content)
    config = {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in message.loss_fn_config_v2.items()
    }
    given = {
        "data": [_datum_from_protobuf(datum) for datum in message.data],
        "loss_fn": message.loss_fn,
        "loss_fn_config": {**message.loss_fn_config, **config},
    }
    key = "forward_input" if message.forward_only else "forward_backward_input"
    return {"model_id": message.model_id, "seq_id": message.seq_id, key: given}


def _datum_from_protobuf(datum: Any) -> dict[str, Any]:
    chunks: list[dict[str, Any]] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") == "encoded_text":
            chunks.append({"tokens": _unpack("i", chunk.encoded_text.tokens)})
        else:
            chunks.append({"expected_tokens": chunk.image.expected_tokens or len(chunk.dmel.dmel) or 1})
    inputs = {name: _tensor_from_protobuf(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def _tensor_from_protobuf(tensor: Any) -> dict[str, Any]:
    letter = "q" if tensor.dtype == pb.DTYPE_INT64 else "f"
    if tensor.WhichOneof("encoding") != "sparse_csr":
        return {"data": _unpack(letter, tensor.dense), "shape": tensor.shape}
    csr = tensor.sparse_csr
    crow, col = _unpack("q", csr.crow_indices), _unpack("q", csr.col_indices)
    layout = {"sparse_crow_indices": crow, "sparse_col_indices": col}
    return {"data": _unpack(letter, csr.values), "shape": tensor.shape, **layout}


def pass_to_protobuf(result: Mapping[str, Any]) -> bytes:
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


def sample_to_protobuf(result: Mapping[str, Any]) -> bytes:
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
