"""Cuts the data of one forward_backward into requests the service takes, and joins what comes back.

A request holds as many datums, in order, as fit both limits; a datum too large for any request goes alone, and the
service decides. The protobuf dialect counts bytes, the JSON dialect counts numbers; the service may set both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tinkex.rules import metrics
from tinkex.types.inputs import Datum, DmelChunk, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk, ModelInputChunk
from tinkex.types.tensor import TensorData
from tinkex.types.training import ForwardBackwardOutput

_TOKEN_BYTES: Final = 4  # int32 on the wire
_INDEX_BYTES: Final = 8  # int64, for the rows and columns of a sparse tensor


def estimate(datum: Datum) -> int:
    """About how many bytes a datum takes as protobuf: exact for the payloads, without the few bytes of framing."""
    return sum(map(_chunk_bytes, datum.model_input.chunks)) + sum(map(_tensor_bytes, datum.loss_fn_inputs.values()))


def count_numbers(datum: Datum) -> int:
    """How many numbers a datum takes as JSON."""
    return sum(map(_chunk_numbers, datum.model_input.chunks)) + sum(map(len, datum.loss_fn_inputs.values()))


JSON_LIMITS: Final = (128, 500_000, count_numbers)
"""How much fits into one request of the JSON dialect: datums, numbers, and what counts the numbers."""


def split(
    data: Sequence[Datum], max_items: int, max_size: int, size: Callable[[Datum], int] = estimate
) -> list[list[Datum]]:
    """The data of each request, in order. None is empty. `split(data, *JSON_LIMITS)` is for the JSON dialect."""
    chunks: list[list[Datum]] = []
    current: list[Datum] = []
    current_size = 0
    for datum in data:
        more = size(datum)
        if current and (len(current) >= max_items or current_size + more > max_size):
            chunks.append(current)
            current, current_size = [], 0
        current.append(datum)
        current_size += more
    if current:
        chunks.append(current)
    return chunks


def join(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Combine the results of the chunks, as if they had been one request."""
    # Without checks: the parts passed them, and integers among the metrics must not become floats.
    return ForwardBackwardOutput.model_construct(
        loss_fn_output_type=outputs[0].loss_fn_output_type if outputs else "",
        loss_fn_outputs=[entry for output in outputs for entry in output.loss_fn_outputs],
        metrics=metrics.combine((output.metrics, len(output.loss_fn_outputs)) for output in outputs),
    )


def _chunk_bytes(chunk: ModelInputChunk) -> int:
    match chunk:
        case EncodedTextChunk():
            return _TOKEN_BYTES * chunk.length
        case ImageChunk():
            return len(chunk.data)
        case ImageAssetPointerChunk():
            return len(chunk.location)
        case DmelChunk():
            return len(chunk.dmel)


def _chunk_numbers(chunk: ModelInputChunk) -> int:
    match chunk:
        case EncodedTextChunk():
            return chunk.length
        case ImageChunk():
            # An image travels as base64: 4/3 characters a byte, where a number takes about five. Counting its tokens
            # alone, as the official client does, lets 128 photographs make a request of hundreds of megabytes.
            return max(chunk.expected_tokens or chunk.tokens or 0, len(chunk.data) // 4)
        case ImageAssetPointerChunk():
            return chunk.expected_tokens or chunk.tokens or 0
        case DmelChunk():
            return len(chunk.dmel) // 4


def _tensor_bytes(tensor: TensorData) -> int:
    if not tensor.is_sparse:
        return tensor.nbytes
    indices = len(tensor.sparse_crow_indices or ()) + len(tensor.sparse_col_indices or ())
    return tensor.nbytes + _INDEX_BYTES * indices
