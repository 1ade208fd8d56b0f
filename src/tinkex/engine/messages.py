"""Commands and replies as frames: written on one side of the pipe, read on the other. No torch in here.

The data of a pass are `[{"tokens": i, "inputs": {name: {"dtype", "shape", "data": i, "crow"?: i, "col"?: i}}}]`,
where every `i` is the index of a buffer: tokens int32, indices int64, values as their dtype says.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tinkex.engine.contract import Sampled, SampleSpec, Tokens
from tinkex.engine.contract import Sequence as SampledSequence
from tinkex.engine.frames import Frame
from tinkex.types.inputs import Datum, EncodedTextChunk
from tinkex.types.packed import Buffer, pack_tokens, unpack
from tinkex.types.tensor import TensorData


def pass_frame(
    op: str, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str] | None
) -> Frame:
    """`forward` or `forward_backward`. The datums hold text alone: `intake` has seen to that.

    Names are sorted: protobuf hands maps out in another order in every process, and an attempt that is repeated after a
    restart has to make the same frame.
    """
    buffers: list[Buffer] = []

    def keep(buffer: Buffer) -> int:
        buffers.append(buffer)
        return len(buffers) - 1

    rows = []
    for datum in data:
        chunks = [chunk.packed() for chunk in datum.model_input.chunks if isinstance(chunk, EncodedTextChunk)]
        tokens = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        inputs = {name: _tensor(tensor, keep) for name, tensor in sorted(datum.loss_fn_inputs.items())}
        rows.append({"tokens": keep(tokens), "inputs": inputs})
    head = {
        "op": op,
        "adapter": adapter,
        "loss_fn": loss_fn,
        "config": dict(sorted((config or {}).items())),
        "data": rows,
    }
    return Frame(head, buffers)


def _tensor(tensor: TensorData, keep: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"dtype": tensor.dtype, "shape": tensor.shape, "data": keep(tensor.buffer)}
    if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
        entry["crow"] = keep(_pack_indices(tensor.sparse_crow_indices))
        entry["col"] = keep(_pack_indices(tensor.sparse_col_indices))
    return entry


def read_outputs(reply: Frame) -> list[dict[str, TensorData]]:
    """The outputs of a pass: one dict of tensors per datum."""
    return [
        {
            name: TensorData.from_buffer(reply.buffers[entry["data"]], entry["dtype"], entry["shape"])
            for name, entry in datum.items()
        }
        for datum in reply.head["outputs"]
    ]


def sample_frame(spec: SampleSpec) -> Frame:
    """The prompt travels packed, the tenant in the packet's header, the rest in the head."""
    elsewhere = ("prompt", "tenant")
    head = {entry.name: getattr(spec, entry.name) for entry in fields(spec) if entry.name not in elsewhere}
    return Frame({"op": "sample", **head}, [pack_tokens(spec.prompt)])


def read_sample(frame: Frame) -> SampleSpec:
    given = {entry.name: frame.head[entry.name] for entry in fields(SampleSpec) if entry.name in frame.head}
    for name in ("stop_tokens", "stop_strings"):
        given[name] = tuple(given.get(name, ()))
    if given.get("targets") is not None:
        given["targets"] = tuple(tuple(row) for row in given["targets"])
    return SampleSpec(prompt=tuple(unpack("i", frame.buffers[0])), **given)


def event_frame(event: Tokens | Sampled) -> Frame:
    """What the engine says about a sample: some tokens, or all of it."""
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
        SampledSequence(
            tokens=row["tokens"],
            logprobs=row["logprobs"],
            stop_reason=row["stop_reason"],
            topk=None if row["topk"] is None else [_pairs(place) for place in row["topk"]],
        )
        for row in head["sequences"]
    ]
    topk, alternatives = head["topk_prompt"], head["alternatives"]
    return Sampled(
        sequences=sequences,
        prompt_logprobs=head["prompt_logprobs"],
        topk_prompt=None if topk is None else [None if place is None else _pairs(place) for place in topk],
        targets=head["targets"],
        alternatives=None if alternatives is None else [_pairs(place) for place in alternatives],
        cache_hit_tokens=head["cache_hit_tokens"],
        prompt_tokens=head["prompt_tokens"],
    )


def _pairs(place: Sequence[Sequence[Any]]) -> list[tuple[int, float]]:
    return [(token, logprob) for token, logprob in place]


def _pack_indices(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
