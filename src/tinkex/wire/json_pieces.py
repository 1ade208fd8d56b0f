"""Writes large results as JSON, some thousand numbers at a time.

A result of two million ranked tokens is 16 MB packed, 50 MB as JSON and 300 MB as Python's objects on the way. Written
at once, in whatever thread, it holds the interpreter for most of a second: every time another thread has waited for a
socket, it waits 5 ms more for the interpreter. So a result is written while it is sent, piece by piece, and each piece
is gone before the next is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tinkex.errors import ValidationError
from tinkex.types.packed import WIDTHS, Buffer, Code, first_not_finite, unpack
from tinkex.types.sampling import SampledSequence, SampleResponse, TopkLogprobs
from tinkex.types.tensor import TensorData
from tinkex.types.training import ForwardBackwardOutput
from tinkex.wire import json_codec
from tinkex.wire.dialect import Dialect

PIECE_NUMBERS = 4096
"""Numbers that become Python's at a time: a token and its log-probability take 130 bytes then, and 0.2 µs to write."""
NUMBERS_PER_DATUM = 50
"""What the object of a datum costs, counted in numbers."""
_CODES: dict[str, Code] = {"int64": "q", "float32": "f"}


def joined(pieces: Iterator[bytes], least_bytes: int) -> Iterator[bytes]:
    """Yield the same bytes in blocks of at least so many; the last may be shorter."""
    block: list[bytes] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= least_bytes:
            yield b"".join(block)
            block, size = [], 0
    if block:
        yield b"".join(block)


def training_pieces(output: ForwardBackwardOutput) -> Iterator[bytes]:
    """Return the JSON of what a pass returned. Raises ValidationError at once for what JSON cannot carry."""
    metrics = json_codec.encode(output.metrics)
    for index, named in enumerate(output.loss_fn_outputs):
        for name, tensor in named.items():
            _check_finite(tensor, f"loss_fn_outputs[{index}].{name}")
    return _training_pieces(output, metrics)


def _training_pieces(output: ForwardBackwardOutput, metrics: bytes) -> Iterator[bytes]:
    yield b'{"loss_fn_output_type":' + json_codec.encode(output.loss_fn_output_type) + b',"loss_fn_outputs":['
    separator = b""
    small: list[Any] = []
    numbers = 0
    for named in output.loss_fn_outputs:
        size = sum(map(_numbers_of, named.values()))
        if size > PIECE_NUMBERS:
            yield from _small_objects(separator, small)
            yield (b"," if small else separator) + b"{"
            yield from _object_pieces(named)
            yield b"}"
            small, numbers, separator = [], 0, b","
            continue
        # One call for several datums: it costs as much as hundreds of numbers.
        small.append({name: json_codec.dump(tensor, Dialect.PROTO) for name, tensor in named.items()})
        numbers += size + NUMBERS_PER_DATUM
        if numbers > PIECE_NUMBERS:
            yield from _small_objects(separator, small)
            small, numbers, separator = [], 0, b","
    yield from _small_objects(separator, small)
    yield b'],"metrics":' + metrics + b"}"


def _small_objects(separator: bytes, objects: list[Any]) -> Iterator[bytes]:
    if objects:
        yield separator + json_codec.encode(objects)[1:-1]


def sample_pieces(response: SampleResponse) -> Iterator[bytes]:
    """Return the JSON of a response to a sample. Raises ValidationError at once for what JSON cannot carry."""
    for index, sequence in enumerate(response.sequences):
        _check_floats(sequence.packed_logprobs(), f"sequences[{index}].logprobs")
        if (topk := sequence.topk_logprobs_np) is not None:
            _check_floats(topk.packed()[1], f"sequences[{index}].topk_logprobs")
    if (topk := response.topk_prompt_logprobs_np) is not None:
        _check_floats(topk.packed()[1], "topk_prompt_logprobs")
    if (targets := response.target_prompt_logprobs) is not None:
        _check_finite(targets, "target_prompt_logprobs")
    if (drawn := response.prompt_alt_tokens) is not None:
        _check_finite(drawn.logprobs, "prompt_alt_tokens.logprobs")
    return _sample_pieces(response)


def _sample_pieces(response: SampleResponse) -> Iterator[bytes]:
    bare = SampleResponse.from_buffers([], None, None, None, response.prompt_cache_hit_tokens, None)
    fields: dict[str, Any] = json_codec.dump(bare, Dialect.PROTO)
    del fields["sequences"]
    yield json_codec.encode(fields)[:-1]  # there is always a type
    if (prompt := response.packed_prompt_logprobs()) is not None:
        yield b',"prompt_logprobs":['
        yield from _list_pieces(_or_none(part) for part in _unpacked("f", prompt))
        yield b"]"
    yield b',"sequences":['
    for index, sequence in enumerate(response.sequences):
        yield b",{" if index else b"{"
        yield from _sequence_pieces(sequence)
        yield b"}"
    yield b"]"
    if (topk := response.topk_prompt_logprobs_np) is not None:
        yield b',"topk_prompt_logprobs":'
        yield from _topk_pieces(topk)
    if (targets := response.target_prompt_logprobs) is not None:
        yield b',"target_prompt_logprobs":'
        yield from _tensor_pieces(targets)
    if (drawn := response.prompt_alt_tokens) is not None:
        yield b',"prompt_alt_tokens":{'
        yield from _object_pieces({"tokens": drawn.tokens, "logprobs": drawn.logprobs})
        yield b"}"
    yield b"}"


def _sequence_pieces(sequence: SampledSequence) -> Iterator[bytes]:
    """Yield the inside of a sequence's object."""
    reason = sequence.raw_stop_reason or sequence.stop_reason
    fields = json_codec.dump(SampledSequence.from_buffers(reason, b"", None, sequence.sequence_id), Dialect.PROTO)
    del fields["tokens"]
    yield json_codec.encode(fields)[1:-1] + b',"tokens":['
    yield from _list_pieces(_unpacked("i", sequence.packed_tokens()))
    yield b"]"
    if (logprobs := sequence.packed_logprobs()) is not None:
        yield b',"logprobs":['
        yield from _list_pieces(_unpacked("f", logprobs))
        yield b"]"
    if (topk := sequence.topk_logprobs_np) is not None:
        yield b',"topk_logprobs":'
        yield from _topk_pieces(topk)


def _or_none(numbers: Sequence[float]) -> list[float | None]:
    """Return the numbers with None for NaN, which stands for a position that has no value."""
    return [None if number != number else number for number in numbers]


def _topk_pieces(topk: TopkLogprobs) -> Iterator[bytes]:
    """Yield ranked tokens as JSON, some rows at a time."""
    tokens, logprobs = topk.packed()
    step = max(PIECE_NUMBERS // max(topk.k, 1), 1)
    yield b"["
    for first in range(0, topk.length, step):
        count = min(step, topk.length - first)
        part = slice(4 * first * topk.k, 4 * (first + count) * topk.k)
        rows = TopkLogprobs.from_buffers(tokens[part], logprobs[part], count, topk.k).to_lists()
        if rows:
            yield (b"," if first else b"") + json_codec.encode(rows, is_finite=True)[1:-1]
    yield b"]"


def _object_pieces(tensors: dict[str, TensorData]) -> Iterator[bytes]:
    """Yield the inside of an object of tensors."""
    for index, (name, tensor) in enumerate(tensors.items()):
        yield (b"," if index else b"") + json_codec.encode(name) + b":"
        yield from _tensor_pieces(tensor)


def _tensor_pieces(tensor: TensorData) -> Iterator[bytes]:
    indices = {"sparse_crow_indices": tensor.sparse_crow_indices, "sparse_col_indices": tensor.sparse_col_indices}
    if _numbers_of(tensor) <= PIECE_NUMBERS:
        yield json_codec.encode(json_codec.dump(tensor, Dialect.PROTO))
        return
    yield b'{"dtype":' + json_codec.encode(tensor.dtype)
    if tensor.shape is not None:
        yield b',"shape":' + json_codec.encode(tensor.shape)
    for name, numbers in indices.items():
        if numbers is not None:
            yield b"," + json_codec.encode(name) + b":["
            yield from _list_pieces(numbers[at : at + PIECE_NUMBERS] for at in range(0, len(numbers), PIECE_NUMBERS))
            yield b"]"
    yield b',"data":['
    yield from _list_pieces(_unpacked(_CODES[tensor.dtype], tensor.buffer))
    yield b"]}"


def _unpacked(code: Code, buffer: Buffer) -> Iterator[Sequence[Any]]:
    step = PIECE_NUMBERS * WIDTHS[code]
    return (unpack(code, buffer[at : at + step]) for at in range(0, len(buffer), step))


def _list_pieces(parts: Iterator[Sequence[Any]]) -> Iterator[bytes]:
    """Yield the inside of a list that comes in parts, none of them empty."""
    for index, part in enumerate(parts):
        yield (b"," if index else b"") + json_codec.encode(part, is_finite=True)[1:-1]


def _numbers_of(tensor: TensorData) -> int:
    return len(tensor) + len(tensor.sparse_crow_indices or ()) + len(tensor.sparse_col_indices or ())


def _check_finite(tensor: TensorData, where: str) -> None:
    if tensor.dtype == "float32":
        _check_floats(tensor.buffer, f"{where}.data")


def _check_floats(buffer: Buffer | None, where: str) -> None:
    """Look for NaN and infinities before a status is sent: later there is no way to say so."""
    size = PIECE_NUMBERS * WIDTHS["f"]
    for start in range(0, len(buffer or b""), size):
        part = bytes((buffer or b"")[start : start + size])
        if (index := first_not_finite(part)) is not None:
            number = unpack("f", part)[index]
            at = start // WIDTHS["f"] + index
            raise ValidationError(f"{where}[{at}] is {number}, which JSON cannot carry.")
