"""Encodes and decodes the protobuf messages of training and sampling, for the client and the service.

Numbers stay packed from end to end: encoding passes buffers on, decoding wraps the bytes that protobuf hands out.
What does not fit is a ValidationError that says where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from math import prod
from typing import Any

from google.protobuf.message import DecodeError

from tinkex.errors import ValidationError
from tinkex.types.base import Value
from tinkex.types.inputs import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    PromptProvenanceSpan,
    ProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    room_of,
)
from tinkex.types.packed import TensorDtype, pack_ints, unpack, widen_ints
from tinkex.types.sampling import PromptAltTokens, SampledSequence, SampleResponse, TopkLogprobs
from tinkex.types.tensor import TensorData
from tinkex.types.training import ForwardBackwardInput, ForwardBackwardOutput, ForwardBackwardRequest, ForwardRequest
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.proto_writer import MAP_VALUE, Parts, blob, double, entry, fields_of, integer, message, packed, text
from tinkex.wire.scan import check_message_elements, check_message_fields

_REQUEST, _CONFIG, _DATUM = (fields_of(kind) for kind in (pb.ForwardBackwardRequest, pb.LossConfigValue, pb.Datum))
DATUMS: int = _REQUEST.data
"""The number of the field with the datums of a training pass."""
_CHUNK, _TEXT, _IMAGE, _DMEL = (
    fields_of(kind) for kind in (pb.Chunk, pb.EncodedTextChunk, pb.ImageChunk, pb.DmelChunk)
)
_SPAN, _TOKENS_SPAN = fields_of(pb.ProvenanceSpan), fields_of(pb.PromptProvenanceSpan)
_OUTPUT, _RECORD, _BATCHED = (fields_of(kind) for kind in (pb.ForwardBackwardOutput, pb.ArrayRecord, pb.BatchedTensor))
_SAMPLE, _SEQUENCE, _TOPK, _ALTERNATIVES = (
    fields_of(kind) for kind in (pb.SampleResponse, pb.SampledSequence, pb.TopkLogprobs, pb.PromptAltTokens)
)
_TENSOR, _CSR = fields_of(pb.Tensor), fields_of(pb.SparseCsr)


MAX_RESULTS = 1 << 16
"""Of a response to a request of unknown size."""
_SMALL_BYTES = 1 << 20
"""Up to here protobuf's own objects take 100 MB at worst, and counting before they are made would cost more."""
_MAX_OUTPUTS = 64
"""Of one datum, by name."""
_MAX_EMPTY_RECORDS = 1 << 10
"""Records without a datum: services may send some, and nothing comes of them."""
_ELEMENTS, _ELEMENTS_EACH = 1 << 14, 1 << 8
"""What a response may consist of, in all and for each result: ten times what services send."""
_MAX_EXTENTS = 64
"""Of a tensor's shape, as in numpy."""
_MAX_DENSE = 1 << 28
"""Numbers of a sparse tensor in a response, if it were dense."""


def decode_answer(
    content: bytes, result_type: type[Value], sequence_ids: Sequence[str] = (), asked: int | None = None
) -> Value:
    """The result of a future, if it is of a type that travels as protobuf. `asked`: how many datums or samples."""
    if result_type is SampleResponse:
        return decode_sample_response(content, sequence_ids, asked)
    if result_type is ForwardBackwardOutput:
        return decode_forward_backward_output(content, asked)
    raise ValidationError(f"{result_type.__name__} does not travel as protobuf")


# ── The request of forward and forward_backward


def encode_forward_backward(
    model_id: str,
    seq_id: int,
    data: Sequence[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None = None,
    forward_only: bool = False,
) -> bytes:
    """One training pass. Image asset pointers have no place in this message and are rejected."""
    parts: Parts = [text(_REQUEST.model_id, model_id), integer(_REQUEST.seq_id, seq_id)]
    for index, datum in enumerate(data):
        parts += message(_REQUEST.data, _datum(datum, index))
    parts.append(text(_REQUEST.loss_fn, loss_fn))
    config = loss_fn_config or {}
    numbers = {name: float(value) for name, value in config.items() if not isinstance(value, str)}
    # Older services read the map of numbers alone; newer ones prefer the second map, which also holds text.
    for name, value in numbers.items():
        parts += entry(_REQUEST.loss_fn_config, name, [double(MAP_VALUE, value)])
    parts.append(integer(_REQUEST.forward_only, forward_only))
    for name, setting in config.items():
        if isinstance(setting, str):
            value_part = text(_CONFIG.text, setting, keep_default=True)
        else:
            value_part = double(_CONFIG.number, numbers[name])
        parts += entry(_REQUEST.loss_fn_config_v2, name, message(MAP_VALUE, [value_part]))
    return b"".join(parts)


def _datum(datum: Datum, index: int) -> Parts:
    parts: Parts = []
    for position, chunk in enumerate(datum.model_input.chunks):
        parts += message(_DATUM.model_input, _chunk(chunk, f"data[{index}].model_input.chunks[{position}]"))
    for name, tensor in datum.loss_fn_inputs.items():
        parts += entry(_DATUM.loss_fn_inputs, name, message(MAP_VALUE, _tensor(tensor)))
    for span in datum.model_input_spans or ():
        parts += message(_DATUM.model_input_spans, _span(span))
    for span in datum.loss_fn_input_spans or ():
        parts += message(_DATUM.loss_fn_input_spans, _span(span))
    return parts


def _chunk(chunk: ModelInputChunk, where: str) -> Parts:
    if isinstance(chunk, EncodedTextChunk):
        return message(_CHUNK.encoded_text, blob(_TEXT.tokens, chunk.packed()))
    if isinstance(chunk, ImageChunk):
        room = room_of(chunk)
        expected = [] if room is None else [integer(_IMAGE.expected_tokens, room, keep_default=True)]
        return message(_CHUNK.image, [*blob(_IMAGE.data, chunk.data), text(_IMAGE.format, chunk.format), *expected])
    if isinstance(chunk, DmelChunk):
        return message(_CHUNK.dmel, blob(_DMEL.dmel, chunk.dmel))
    raise ValidationError(
        f"{where} is an {type(chunk).__name__}, which this service takes in sampling prompts only. "
        "For training, load the image and pass ImageChunk(data=..., format=...)."
    )


def _span(span: ProvenanceSpan) -> Parts:
    parts: Parts = [
        text(_TOKENS_SPAN.sequence_id, span.sequence_id),
        integer(_TOKENS_SPAN.offset, span.offset),
        integer(_TOKENS_SPAN.length, span.length),
    ]
    return message(_SPAN.sampled_tokens if isinstance(span, SampledProvenanceSpan) else _SPAN.prompt_tokens, parts)


def decode_forward_backward_request(content: bytes) -> ForwardBackwardRequest | ForwardRequest:
    """The same value as from a JSON body: a ForwardRequest if only the forward pass is asked for."""
    request = _parse(pb.ForwardBackwardRequest, content)
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    batch = ForwardBackwardInput(
        data=[_read_datum(datum, index) for index, datum in enumerate(request.data)],
        loss_fn=request.loss_fn,
        loss_fn_config=config or None,
    )
    if request.forward_only:
        return ForwardRequest(forward_input=batch, model_id=request.model_id, seq_id=request.seq_id)
    return ForwardBackwardRequest(forward_backward_input=batch, model_id=request.model_id, seq_id=request.seq_id)


def check_forward_backward_request(content: bytes, max_datums: int, max_fields: int, max_elements: int) -> None:
    """Reject a request that would become too many objects, before any of them is made: see `scan`."""
    check_message_fields(content, DATUMS, max_datums, max_fields, "datums", pb.Datum.DESCRIPTOR, max_elements)


def peek_forward_backward_request(content: bytes) -> tuple[str | None, int | None]:
    """Return model and sequence number of a request whose data cannot be read; None where they cannot either."""
    try:
        request = _parse(pb.ForwardBackwardRequest, content)
    except ValidationError:
        return None, None
    return request.model_id, request.seq_id


def _read_datum(datum: Any, index: int) -> Datum:
    try:
        model_input = ModelInput(chunks=[_read_chunk(chunk) for chunk in datum.model_input])
        tensors = {name: read_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
        if not datum.model_input_spans and not datum.loss_fn_input_spans:
            return Datum(model_input, tensors)
        return Datum(model_input, tensors, _read_spans(datum.model_input_spans), _read_spans(datum.loss_fn_input_spans))
    except ValidationError as error:
        raise ValidationError(f"data[{index}]: {error}") from None


def _read_chunk(chunk: Any) -> ModelInputChunk:
    kind = chunk.WhichOneof("chunk")
    if kind == "encoded_text":
        return EncodedTextChunk.from_packed(chunk.encoded_text.tokens)
    if kind == "image":
        image = chunk.image
        fields: dict[str, Any] = {"data": image.data, "format": image.format}
        if image.HasField("expected_tokens"):
            fields["expected_tokens"] = image.expected_tokens
        if image.HasField("override_dimensions"):
            fields |= {"width": image.override_dimensions.width, "height": image.override_dimensions.height}
        return ImageChunk(**fields)
    if kind == "dmel":
        return DmelChunk(dmel=chunk.dmel.dmel)
    raise ValidationError("a chunk is neither text, image nor dmel")


def _read_spans(spans: Any) -> ProvenanceSpans:
    out: ProvenanceSpans = []
    for span in spans:
        kind = SampledProvenanceSpan if span.HasField("sampled_tokens") else PromptProvenanceSpan
        run = span.sampled_tokens if kind is SampledProvenanceSpan else span.prompt_tokens
        out.append(kind(sequence_id=run.sequence_id, offset=run.offset, length=run.length))
    return out


# ── The response of forward and forward_backward


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """Each output of all datums lies end to end; where keys, dtypes or row shapes change, a new record begins."""
    parts: Parts = [text(_OUTPUT.loss_fn_output_type, output.loss_fn_output_type)]
    for _, run in groupby(output.loss_fn_outputs, key=_layout):
        parts += message(_OUTPUT.loss_fn_outputs, _record(list(run)))
    for name, value in output.metrics.items():
        parts += entry(_OUTPUT.metrics, name, [double(MAP_VALUE, value)])
    return b"".join(parts)


def _layout(datum: Mapping[str, TensorData]) -> dict[str, tuple[str, list[int]]]:
    return {name: (tensor.dtype, (tensor.shape or [])[1:]) for name, tensor in datum.items()}


def _record(datums: Sequence[Mapping[str, TensorData]]) -> Parts:
    parts: Parts = []
    for name, (dtype, row_shape) in _layout(datums[0]).items():
        tensors = [datum[name] for datum in datums]
        if any(tensor.is_sparse for tensor in tensors):
            raise ValidationError(f"the output {name!r} is sparse, which an answer cannot carry")
        offsets = [0]
        for tensor in tensors:
            offsets.append(offsets[-1] + tensor.nbytes)
        # One field of many buffers: they are joined only once, in the finished answer.
        data: Parts = [tensor.buffer for tensor in tensors if tensor.nbytes]
        fields = [*(message(_BATCHED.data, data) if data else []), *blob(_BATCHED.offsets, pack_ints(offsets))]
        fields += [integer(_BATCHED.dtype, _DTYPE_NUMBERS[dtype]), packed(_BATCHED.trailing_shape, row_shape)]
        parts += entry(_RECORD.fields, name, message(MAP_VALUE, fields))
    return [*parts, integer(_RECORD.num_datums, len(datums))]


def decode_forward_backward_output(content: bytes, asked: int | None = None) -> ForwardBackwardOutput:
    """One dict of tensors per datum; the tensors of one output share one buffer.

    More datums than were `asked` for do not fit: a few bytes can claim any number of them.
    """
    max_datums = MAX_RESULTS if asked is None else asked
    output = _parse_result(pb.ForwardBackwardOutput, content, max_datums)
    if len(output.loss_fn_outputs) > max_datums + _MAX_EMPTY_RECORDS:
        raise ValidationError(f"it has {len(output.loss_fn_outputs)} records for {max_datums} datums")
    records = [record for record in output.loss_fn_outputs if record.num_datums or record.fields]
    if len(records) > max_datums:
        raise ValidationError(f"it has {len(records)} records for {max_datums} datums")
    datums: list[dict[str, TensorData]] = []
    for record in records:
        if len(record.fields) > _MAX_OUTPUTS:
            raise ValidationError(f"it has {len(record.fields)} outputs for each datum")
        left = max_datums - len(datums)
        if record.num_datums > left:
            raise ValidationError(f"it has {len(datums) + record.num_datums} outputs for {max_datums} datums")
        columns = {name: _read_column(field, name, left) for name, field in record.fields.items()}
        # The count also stands when the service left out every output; services before it count by the first one.
        count = record.num_datums or max(map(len, columns.values()), default=0)
        for name, column in columns.items():
            if len(column) != count:
                raise ValidationError(f"the output {name!r} has {len(column)} entries for {count} datums")
        datums += [{name: column[index] for name, column in columns.items()} for index in range(count)]
    return ForwardBackwardOutput.model_construct(
        loss_fn_output_type=output.loss_fn_output_type.rsplit(":", 1)[-1] or "ArrayRecord",
        loss_fn_outputs=datums,
        metrics=dict(output.metrics),
    )


def _read_column(field: Any, name: str, max_datums: int) -> list[TensorData]:
    try:
        dtype, row_shape = _dtype_of(field.dtype), _extents(field.trailing_shape)
        if len(field.offsets) > 8 * (max_datums + 1):
            raise ValidationError(f"more than {max_datums} entries, one for each datum")
        raw, offsets = field.data, _indices(field.offsets)
        data = memoryview(_widened(raw, field.dtype))
        if offsets and not (offsets[0] >= 0 and offsets[-1] <= len(raw) and sorted(offsets) == offsets):
            raise ValidationError(f"offsets do not rise from 0 to {len(raw)}")
        growth = len(data) // len(raw) if raw else 1
        row_bytes = prod(row_shape) * (8 if dtype == "int64" else 4)
        bounds = [offset * growth for offset in offsets]
        return [
            TensorData.from_buffer(data[start:end], dtype, [(end - start) // row_bytes if row_bytes else 0, *row_shape])
            for start, end in pairwise(bounds)
        ]
    except ValidationError as error:
        raise ValidationError(f"the output {name!r}: {error}") from None


# ── The response of asample


def encode_sample_response(response: SampleResponse) -> bytes:
    parts: Parts = []
    for sequence in response.sequences:
        parts += message(_SAMPLE.sequences, _sequence(sequence))
    if (logprobs := response.packed_prompt_logprobs()) is not None:
        parts += blob(_SAMPLE.prompt_logprobs, logprobs, keep_default=True)
    if (topk := response.topk_prompt_logprobs_np) is not None:
        parts += message(_SAMPLE.topk_prompt_logprobs, _topk(topk))
    parts.append(integer(_SAMPLE.prompt_cache_hit_tokens, response.prompt_cache_hit_tokens))
    if (targets := response.target_prompt_logprobs) is not None:
        parts += message(_SAMPLE.target_prompt_logprobs, _tensor(targets))
    if (alternatives := response.prompt_alt_tokens) is not None:
        tokens = message(_ALTERNATIVES.tokens, _tensor(alternatives.tokens))
        values = message(_ALTERNATIVES.logprobs, _tensor(alternatives.logprobs))
        parts += message(_SAMPLE.prompt_alt_tokens, [*tokens, *values])
    return b"".join(parts)


def _sequence(sequence: SampledSequence) -> Parts:
    is_length = sequence.stop_reason == "length"
    parts: Parts = [integer(_SEQUENCE.stop_reason, is_length), *blob(_SEQUENCE.tokens, sequence.packed_tokens())]
    if (logprobs := sequence.packed_logprobs()) is not None:
        parts += blob(_SEQUENCE.logprobs, logprobs, keep_default=True)
    if (topk := sequence.topk_logprobs_np) is not None:
        parts += message(_SEQUENCE.topk_sampled_logprobs, _topk(topk))
    return parts


def _topk(topk: TopkLogprobs) -> Parts:
    token_ids, logprobs = topk.packed()
    buffers = [*blob(_TOPK.token_ids, token_ids), *blob(_TOPK.logprobs, logprobs)]
    return [*buffers, integer(_TOPK.k, topk.k), integer(_TOPK.length, topk.length)]


def decode_sample_response(
    content: bytes, sequence_ids: Sequence[str] = (), asked: int | None = None
) -> SampleResponse:
    """The ids are those that the service named when it accepted the request; without them they stay empty.

    More sequences than were `asked` for do not fit.
    """
    max_sequences = MAX_RESULTS if asked is None else asked
    response = _parse_result(pb.SampleResponse, content, max_sequences)
    if len(response.sequences) > max_sequences:
        raise ValidationError(f"it has {len(response.sequences)} sequences for {max_sequences} samples")
    ids = [*sequence_ids, *[""] * (len(response.sequences) - len(sequence_ids))]
    sequences = [_read_sequence(sequence, name) for sequence, name in zip(response.sequences, ids, strict=False)]
    alternatives = None
    if response.HasField("prompt_alt_tokens"):
        both = response.prompt_alt_tokens
        alternatives = PromptAltTokens(_read_result_tensor(both.tokens), _read_result_tensor(both.logprobs))
    return SampleResponse.from_buffers(
        sequences,
        _whole_numbers(response.prompt_logprobs) if response.HasField("prompt_logprobs") else None,
        _read_topk(response.topk_prompt_logprobs) if response.HasField("topk_prompt_logprobs") else None,
        _read_result_tensor(response.target_prompt_logprobs) if response.HasField("target_prompt_logprobs") else None,
        response.prompt_cache_hit_tokens,
        alternatives,
    )


def _read_sequence(sequence: Any, sequence_id: str) -> SampledSequence:
    reason = sequence.stop_reason
    return SampledSequence.from_buffers(
        _STOP_REASONS.get(reason) or str(reason),  # a number from a newer service: kept, and read as `stop`
        _whole_numbers(sequence.tokens),
        _whole_numbers(sequence.logprobs) if sequence.HasField("logprobs") else None,
        sequence_id,
        _read_topk(sequence.topk_sampled_logprobs) if sequence.HasField("topk_sampled_logprobs") else None,
    )


_STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}


def _read_topk(topk: Any) -> TopkLogprobs | None:
    # Official services write an empty matrix where nothing was asked for.
    is_empty = topk.length == 0 or topk.k == 0
    return None if is_empty else TopkLogprobs.from_buffers(topk.token_ids, topk.logprobs, topk.length, topk.k)


# ── Tensors: the wire has four dtypes, values have two


_DTYPE_NUMBERS: dict[str, int] = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}
_DTYPES: dict[int, TensorDtype] = {
    pb.DTYPE_FLOAT32: "float32",
    pb.DTYPE_INT64: "int64",
    pb.DTYPE_INT32: "int64",
    pb.DTYPE_BFLOAT16: "float32",
}


def _tensor(tensor: TensorData) -> Parts:
    if tensor.sparse_crow_indices is None:
        parts = blob(_TENSOR.dense, tensor.buffer, keep_default=True)
    else:
        crow, col = pack_ints(tensor.sparse_crow_indices), pack_ints(tensor.sparse_col_indices or [])
        values = blob(_CSR.values, tensor.buffer)
        parts = message(_TENSOR.sparse_csr, [*values, *blob(_CSR.crow_indices, crow), *blob(_CSR.col_indices, col)])
    return [*parts, integer(_TENSOR.dtype, _DTYPE_NUMBERS[tensor.dtype]), packed(_TENSOR.shape, tensor.shape or ())]


def read_tensor(tensor: Any) -> TensorData:
    """A tensor over the bytes that protobuf hands out; without a shape it is one-dimensional."""
    shape = _extents(tensor.shape) or None
    dtype = _dtype_of(tensor.dtype)
    if not tensor.HasField("sparse_csr"):
        return TensorData.from_buffer(_widened(tensor.dense, tensor.dtype), dtype, shape)
    csr = tensor.sparse_csr
    crow, col = _indices(csr.crow_indices), _indices(csr.col_indices)
    return TensorData.from_buffer(_widened(csr.values, tensor.dtype), dtype, shape, crow, col)


def _read_result_tensor(tensor: Any) -> TensorData:
    """A tensor of a response, which may be read as a dense one: that must fit into memory."""
    value = read_tensor(tensor)
    if value.is_sparse and value.size > _MAX_DENSE:
        raise ValidationError(f"a sparse tensor has the shape {value.shape}, more than {_MAX_DENSE:,} numbers")
    return value


def _extents(shape: Any) -> list[int]:
    if len(shape) > _MAX_EXTENTS:
        raise ValidationError(f"a tensor has {len(shape)} extents, more than {_MAX_EXTENTS}")
    return list(shape)


def _dtype_of(wire_dtype: int) -> TensorDtype:
    """The dtype that a value has for one on the wire."""
    try:
        return _DTYPES[wire_dtype]
    except KeyError:
        raise ValidationError(f"a tensor has the unknown dtype {wire_dtype}") from None


def _widened(buffer: bytes, wire_dtype: int) -> bytes:
    """The two narrow dtypes become int64 and float32; the others pass untouched."""
    if wire_dtype == pb.DTYPE_INT32:
        return widen_ints(_whole_numbers(buffer))
    if wire_dtype == pb.DTYPE_BFLOAT16:  # the upper half of a float32
        out = bytearray(2 * len(_whole_numbers(buffer, 2)))
        out[2::4], out[3::4] = buffer[0::2], buffer[1::2]
        return bytes(out)
    return buffer


def _indices(buffer: bytes) -> list[int]:
    return unpack("q", _whole_numbers(buffer, 8))


def _whole_numbers(buffer: bytes, width: int = 4) -> bytes:
    """The same bytes; ValidationError if the last number is cut."""
    if len(buffer) % width:
        raise ValidationError(f"{len(buffer)} bytes are not a whole number of {width}-byte values")
    return buffer


def _parse_result(kind: Any, content: bytes, results: int) -> Any:
    """`_parse`, after a count of what the bytes would become: two of them can be a message of 300."""
    if len(content) > _SMALL_BYTES:
        check_message_elements(content, kind.DESCRIPTOR, _ELEMENTS + _ELEMENTS_EACH * results)
    return _parse(kind, content)


def _parse(kind: Any, content: bytes) -> Any:
    """A message of the generated class, or a ValidationError."""
    try:
        return kind.FromString(content)
    except (DecodeError, UnicodeDecodeError) as error:  # the latter from the pure-Python runtime
        raise ValidationError(f"{len(content)} bytes are not a {kind.DESCRIPTOR.name}: {error}") from None
