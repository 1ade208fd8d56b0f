"""Writes commands and replies as frames and reads them back, one on each side of the pipe. No torch in here.

The data of a pass are `[{"tokens": i, "inputs": {name: {"dtype", "shape", "data": i, "crow"?: i, "col"?: i}}}]`,
where every `i` is the index of a buffer: tokens int32, indices int64, values as their dtype says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tinkex.engine.contract import Sampled, SampleSpec, SequenceOutput, Tokens
from tinkex.engine.frames import Frame
from tinkex.types.inputs import Datum, EncodedTextChunk
from tinkex.types.packed import Buffer, pack_tokens, unpack
from tinkex.types.tensor import TensorData

_NOT_IN_HEAD = ("prompt", "tenant")
"""Fields of a `SampleSpec` that travel elsewhere: as a buffer, and in the packet's header."""


def pass_frame(
    op: str, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str] | None
) -> Frame:
    """Make the frame of a `forward` or `forward_backward`. The server has checked that the data contain only text.

    Names are sorted: protobuf returns the entries of a map in another order in every process, and a request that is
    repeated after a restart has to make the same frame.
    """
    buffers: list[Buffer] = []

    def add_buffer(buffer: Buffer) -> int:
        buffers.append(buffer)
        return len(buffers) - 1

    rows = []
    for datum in data:
        chunks = [chunk.packed() for chunk in datum.model_input.chunks if isinstance(chunk, EncodedTextChunk)]
        tokens = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        inputs = {name: _tensor_entry(tensor, add_buffer) for name, tensor in sorted(datum.loss_fn_inputs.items())}
        rows.append({"tokens": add_buffer(tokens), "inputs": inputs})
    head = {
        "op": op,
        "adapter": adapter,
        "loss_fn": loss_fn,
        "config": dict(sorted((config or {}).items())),
        "data": rows,
    }
    return Frame(head, buffers)


def _tensor_entry(tensor: TensorData, add_buffer: Callable[[Buffer], int]) -> dict[str, Any]:
    entry: dict[str, Any] = {"dtype": tensor.dtype, "shape": tensor.shape, "data": add_buffer(tensor.buffer)}
    if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
        entry["crow"] = add_buffer(_pack_indices(tensor.sparse_crow_indices))
        entry["col"] = add_buffer(_pack_indices(tensor.sparse_col_indices))
    return entry


def read_outputs(reply: Frame) -> list[dict[str, TensorData]]:
    """Read the outputs of a pass: one dict of tensors per datum."""
    return [
        {
            name: TensorData.from_buffer(reply.buffers[entry["data"]], entry["dtype"], entry["shape"])
            for name, entry in datum.items()
        }
        for datum in reply.head["outputs"]
    ]


def sample_frame(spec: SampleSpec) -> Frame:
    """Make the frame of a sample. The tenant is not in it: it travels in the packet's header."""
    head = {entry.name: getattr(spec, entry.name) for entry in fields(spec) if entry.name not in _NOT_IN_HEAD}
    return Frame({"op": "sample", **head}, [pack_tokens(spec.prompt)])


def read_sample(frame: Frame) -> SampleSpec:
    values = {entry.name: frame.head[entry.name] for entry in fields(SampleSpec) if entry.name in frame.head}
    for name in ("stop_tokens", "stop_strings"):
        values[name] = tuple(values.get(name, ()))
    if values.get("targets") is not None:
        values["targets"] = tuple(tuple(row) for row in values["targets"])
    return SampleSpec(prompt=tuple(unpack("i", frame.buffers[0])), **values)


def event_frame(event: Tokens | Sampled) -> Frame:
    """Make the frame of some tokens of a sample, or of its whole result."""
    if isinstance(event, Tokens):
        return Frame({"tokens": event.tokens, "logprobs": event.logprobs, "index": event.index})
    head = {entry.name: getattr(event, entry.name) for entry in fields(event) if entry.name != "sequences"}
    sequences = [{entry.name: getattr(row, entry.name) for entry in fields(row)} for row in event.sequences]
    return Frame({**head, "sequences": sequences})


def read_event(frame: Frame) -> Tokens | Sampled:
    head = frame.head
    if "sequences" not in head:
        return Tokens(head["index"], head["tokens"], head["logprobs"])
    sequences = [
        SequenceOutput(
            tokens=row["tokens"],
            logprobs=row["logprobs"],
            stop_reason=row["stop_reason"],
            topk=None if row["topk"] is None else [_pairs(ranked) for ranked in row["topk"]],
        )
        for row in head["sequences"]
    ]
    topk, alternatives = head["topk_prompt"], head["alternatives"]
    return Sampled(
        sequences=sequences,
        prompt_logprobs=head["prompt_logprobs"],
        topk_prompt=None if topk is None else [None if ranked is None else _pairs(ranked) for ranked in topk],
        targets=head["targets"],
        alternatives=None if alternatives is None else [_pairs(drawn) for drawn in alternatives],
        cache_hit_tokens=head["cache_hit_tokens"],
        prompt_tokens=head["prompt_tokens"],
    )


def _pairs(entries: Sequence[Sequence[Any]]) -> list[tuple[int, float]]:
    return [(token, logprob) for token, logprob in entries]


def _pack_indices(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
