"""Protobuf, both directions. The protobuf runtime is the judge: it reads what we write and writes what we read."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ValidationError
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptAltTokens,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from tinkex.wire import proto_codec, proto_writer
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.proto_codec import read_tensor

ROOT = Path(__file__).resolve().parents[3]

# ── Values of every shape

ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
float32s = st.floats(width=32, allow_nan=False)
int64s = st.integers(-(2**63), 2**63 - 1)


@st.composite
def tensors(draw: st.DrawFn) -> TensorData:
    dtype: Any
    dtype, numbers = draw(st.sampled_from([("int64", int64s), ("float32", float32s)]))
    kind = draw(st.sampled_from(["flat", "shaped", "sparse"]))
    if kind == "flat":
        return TensorData(draw(st.lists(numbers, max_size=6)), dtype)
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    if kind == "shaped":
        values = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
        return TensorData(values, dtype, [rows, columns])
    stored = [draw(st.lists(st.booleans(), min_size=columns, max_size=columns)) for _ in range(rows)]
    crow = [sum(map(sum, stored[:row])) for row in range(rows + 1)]
    col = [column for row in stored for column, is_stored in enumerate(row) if is_stored]
    return TensorData(draw(st.lists(numbers, min_size=len(col), max_size=len(col))), dtype, [rows, columns], crow, col)


chunks = st.one_of(
    tokens.map(lambda run: EncodedTextChunk(tokens=run)),
    st.builds(ImageChunk, data=st.binary(max_size=9), format=st.sampled_from(["png", "jpeg"])),
    st.builds(ImageChunk, data=st.binary(), format=st.just("png"), expected_tokens=st.integers(0, 2**31 - 1)),
    st.builds(DmelChunk, dmel=st.binary(max_size=9)),
)
spans = st.lists(
    st.builds(PromptProvenanceSpan, sequence_id=ids, offset=st.integers(0, 2**40), length=st.integers(0, 2**40))
    | st.builds(SampledProvenanceSpan, sequence_id=ids, offset=st.integers(0, 9), length=st.integers(0, 9)),
    min_size=1,
    max_size=3,
)
inputs = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), tensors(), max_size=3)
datums = st.builds(
    lambda run, tensors, pair: Datum(ModelInput(chunks=run), tensors, *pair),
    st.lists(chunks, max_size=3),
    inputs,
    st.just((None, None)) | st.tuples(spans, spans),
)
configs = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False) | ids, max_size=3
)


@given(ids, st.integers(1, 2**31 - 1), st.lists(datums, max_size=3), ids, configs, st.booleans())
def test_a_training_request_reads_back_as_it_was_made(
    model_id: str, seq_id: int, data: list[Datum], loss_fn: str, config: dict[str, Any], forward_only: bool
) -> None:
    content = proto_codec.encode_forward_backward(model_id, seq_id, data, loss_fn, config, forward_only)
    batch = ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config or None)
    ids: dict[str, Any] = {"model_id": model_id, "seq_id": seq_id}
    expected = (
        ForwardRequest(forward_input=batch, **ids)
        if forward_only
        else ForwardBackwardRequest(forward_backward_input=batch, **ids)
    )
    assert proto_codec.decode_forward_backward_request(content) == expected


def one_at_most(entries: dict[str, Any]) -> dict[str, Any]:
    return dict(list(entries.items())[:1])


@given(ids, st.integers(0, 2**31 - 1), st.lists(datums, max_size=3), ids, configs, st.booleans())
def test_what_we_write_is_what_the_protobuf_runtime_would_write(
    model_id: str, seq_id: int, data: list[Datum], loss_fn: str, config: dict[str, Any], forward_only: bool
) -> None:
    """Byte for byte. Only the order of map entries is left open by protobuf, so each map has one at most."""
    data = [datum.model_copy(update={"loss_fn_inputs": one_at_most(datum.loss_fn_inputs)}) for datum in data]
    content = proto_codec.encode_forward_backward(model_id, seq_id, data, loss_fn, one_at_most(config), forward_only)
    assert pb.ForwardBackwardRequest.FromString(content).SerializeToString() == content


def request_of(*data: Datum, config: Any = None, forward_only: bool = False) -> Any:
    content = proto_codec.encode_forward_backward("m", 1, data, "cross_entropy", config, forward_only)
    return pb.ForwardBackwardRequest.FromString(content)


def text_datum(**loss_fn_inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints([1, 2, 3]), loss_fn_inputs)


def test_numbers_of_the_loss_config_go_to_both_maps_and_text_to_the_second() -> None:
    sent = request_of(text_datum(), config={"beta": 1, "loss_id": "x", "empty": ""})
    assert dict(sent.loss_fn_config) == {"beta": 1.0}
    assert sent.loss_fn_config_v2["beta"].number == 1.0
    assert sent.loss_fn_config_v2["loss_id"].text == "x"
    assert sent.loss_fn_config_v2["empty"].WhichOneof("value") == "text"


def test_a_service_that_filled_only_the_old_map_is_understood() -> None:
    old = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo", loss_fn_config={"beta": 0.5})
    read = proto_codec.decode_forward_backward_request(old.SerializeToString())
    assert isinstance(read, ForwardBackwardRequest)
    assert read.forward_backward_input.loss_fn_config == {"beta": 0.5}


def test_an_asset_pointer_in_training_data_is_refused_with_its_place_and_the_remedy() -> None:
    pointer = ImageAssetPointerChunk(location="gs://a/b.png", format="png")
    bad = Datum(ModelInput(chunks=[EncodedTextChunk(tokens=[1]), pointer]), {})
    with pytest.raises(ValidationError, match=r"data\[1\]\.model_input\.chunks\[1\].*ImageChunk\(data="):
        request_of(text_datum(), bad)


def test_an_image_of_the_old_kind_keeps_the_room_it_takes() -> None:
    image = ImageChunk(data=b"x", format="png", height=4, tokens=2, width=6)
    (datum,) = request_of(Datum(ModelInput(chunks=[image]), {})).data
    assert datum.model_input[0].image.expected_tokens == 2
    assert not datum.model_input[0].image.HasField("override_dimensions")


def test_dimensions_that_a_client_overrides_are_read() -> None:
    chunk = pb.Chunk(image={"data": b"x", "format": "png", "override_dimensions": {"width": 6, "height": 4}})
    content = pb.ForwardBackwardRequest(loss_fn="x", data=[{"model_input": [chunk]}]).SerializeToString()
    read = proto_codec.decode_forward_backward_request(content)
    (image,) = read.forward_backward_input.data[0].model_input.chunks  # type: ignore[union-attr]
    assert isinstance(image, ImageChunk) and (image.width, image.height) == (6, 4)


def test_a_tensor_without_a_shape_stays_without_one() -> None:
    tensor = request_of(text_datum(weights=TensorData([0.5, 1.0], "float32"))).data[0].loss_fn_inputs["weights"]
    assert list(tensor.shape) == []
    assert read_tensor(tensor) == TensorData([0.5, 1.0], "float32")
    assert read_tensor(tensor).tolist() == [0.5, 1.0]


def test_narrow_dtypes_are_widened_on_the_way_in() -> None:
    int32 = pb.Tensor(dense=struct.pack("<3i", 1, -2, 2**31 - 1), dtype=pb.DTYPE_INT32, shape=[3])
    assert read_tensor(int32) == TensorData([1, -2, 2**31 - 1], "int64", [3])
    halves = b"".join(struct.pack("<f", value)[2:] for value in (1.0, -0.5, math.inf))
    bfloat16 = pb.Tensor(dense=halves, dtype=pb.DTYPE_BFLOAT16, shape=[3, 1])
    assert read_tensor(bfloat16) == TensorData([1.0, -0.5, math.inf], "float32", [3, 1])


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (pb.Tensor(dense=b"1234", dtype=pb.DTYPE_UNSPECIFIED), "unknown dtype 0"),
        (pb.Tensor(dense=b"12345", dtype=pb.DTYPE_FLOAT32), "5 bytes are not a whole number"),
        (pb.Tensor(dense=b"123", dtype=pb.DTYPE_BFLOAT16), "3 bytes are not a whole number"),
        (pb.Tensor(dense=b"12345678", dtype=pb.DTYPE_FLOAT32, shape=[3]), r"shape \[3\] does not hold 2 values"),
        (pb.Tensor(sparse_csr={"crow_indices": b"123"}, dtype=pb.DTYPE_INT64, shape=[1, 1]), "3 bytes"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_with_the_number_of_its_datum(tensor: Any, reason: str) -> None:
    data = [pb.Datum(), pb.Datum(loss_fn_inputs={"weights": tensor})]
    content = pb.ForwardBackwardRequest(loss_fn="x", data=data).SerializeToString()
    with pytest.raises(ValidationError, match=rf"data\[1\]: .*{reason}"):
        proto_codec.decode_forward_backward_request(content)


def test_a_chunk_of_no_kind_is_refused() -> None:
    content = pb.ForwardBackwardRequest(loss_fn="x", data=[{"model_input": [pb.Chunk()]}]).SerializeToString()
    with pytest.raises(ValidationError, match=r"data\[0\]: a chunk is neither"):
        proto_codec.decode_forward_backward_request(content)


@pytest.mark.parametrize("content", [b"\xff", b"\x1a\x05abc", b"\x0a\x01\xff"])
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    with pytest.raises(ValidationError, match="are not a ForwardBackwardRequest"):
        proto_codec.decode_forward_backward_request(content)


@given(st.binary(max_size=60))
def test_no_bytes_whatsoever_raise_anything_but_a_validation_error(content: bytes) -> None:
    decoders = (
        proto_codec.decode_forward_backward_request,
        proto_codec.decode_forward_backward_output,
        proto_codec.decode_sample_response,
    )
    for decode in decoders:
        try:
            decode(content)
        except ValidationError:
            pass


def test_decoding_wraps_the_bytes_of_protobuf_instead_of_copying_them() -> None:
    message = pb.Tensor(dense=bytes(8_000), dtype=pb.DTYPE_FLOAT32)

    class Watched:
        """Stands in for a message and remembers what it handed out."""

        dtype, shape = message.dtype, ()
        dense = message.dense

        def HasField(self, name: str) -> bool:
            return bool(message.HasField(name))

    assert read_tensor(cast("Any", Watched())).buffer is Watched.dense


def test_the_outputs_of_many_datums_share_one_buffer() -> None:
    rows = [{"logprobs": TensorData([float(row)] * 5, "float32", [5])} for row in range(4)]
    output = ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=rows, metrics={})
    read = proto_codec.decode_forward_backward_output(proto_codec.encode_forward_backward_output(output))
    buffers = [datum["logprobs"].buffer for datum in read.loss_fn_outputs]
    assert all(isinstance(buffer, memoryview) for buffer in buffers)
    assert len({id(buffer.obj) for buffer in buffers if isinstance(buffer, memoryview)}) == 1


# ── Outputs of a training pass

dense = tensors().filter(lambda tensor: not tensor.is_sparse and (tensor.shape is None or 0 not in tensor.shape[1:]))


def shaped(tensor: TensorData) -> TensorData:
    """An answer always has a shape: without one, a tensor is one-dimensional."""
    return tensor if tensor.shape is not None else TensorData.from_buffer(tensor.buffer, tensor.dtype, [len(tensor)])


@given(
    ids.filter(lambda word: ":" not in word), st.lists(st.dictionaries(ids, dense, max_size=2), max_size=5), st.data()
)
def test_outputs_read_back_as_they_were_even_if_every_datum_has_another_layout(
    word: str, rows: list[dict[str, TensorData]], data: st.DataObject
) -> None:
    metrics = data.draw(st.dictionaries(ids, st.floats(allow_nan=False), max_size=3))
    output = ForwardBackwardOutput(loss_fn_output_type=word, loss_fn_outputs=rows, metrics=metrics)
    read = proto_codec.decode_forward_backward_output(proto_codec.encode_forward_backward_output(output))
    expected = [{name: shaped(tensor) for name, tensor in row.items()} for row in rows]
    assert read == ForwardBackwardOutput(loss_fn_output_type=word, loss_fn_outputs=expected, metrics=metrics)


def test_datums_of_one_layout_travel_in_one_record() -> None:
    rows = [{"logprobs": TensorData([0.5] * n, "float32", [n])} for n in (3, 0, 2)]
    content = proto_codec.encode_forward_backward_output(
        ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=rows, metrics={})
    )
    (record,) = pb.ForwardBackwardOutput.FromString(content).loss_fn_outputs
    assert record.num_datums == 3
    assert struct.unpack("<4q", record.fields["logprobs"].offsets) == (0, 12, 12, 20)


def record(raw: bytes, bounds: list[int], **more: Any) -> Any:
    packed = struct.pack(f"<{len(bounds)}q", *bounds)
    field = pb.BatchedTensor(**({"data": raw, "offsets": packed, "dtype": pb.DTYPE_FLOAT32} | more))
    return pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(bounds) - 1)


def output_of(*records: Any, word: str = "") -> ForwardBackwardOutput:
    message = pb.ForwardBackwardOutput(loss_fn_output_type=word, loss_fn_outputs=records)
    return proto_codec.decode_forward_backward_output(message.SerializeToString())


def test_several_records_are_laid_end_to_end() -> None:
    one, two = struct.pack("<f", 1.0), struct.pack("<2f", 2.0, 3.0)
    read = output_of(record(one, [0, 4]), record(two, [0, 8], trailing_shape=[2]))
    assert [datum["logprobs"].tolist() for datum in read.loss_fn_outputs] == [[1.0], [[2.0, 3.0]]]


def test_offsets_count_the_bytes_before_widening() -> None:
    raw = struct.pack("<3i", 7, 8, 9)
    read = output_of(record(raw, [0, 4, 12], dtype=pb.DTYPE_INT32))
    assert [datum["logprobs"].tolist() for datum in read.loss_fn_outputs] == [[7], [8, 9]]


def test_a_record_without_a_count_or_without_fields_still_has_its_datums() -> None:
    uncounted = record(struct.pack("<2f", 1, 2), [0, 4, 8])
    uncounted.num_datums = 0
    assert len(output_of(uncounted).loss_fn_outputs) == 2
    assert output_of(pb.ArrayRecord(num_datums=3)).loss_fn_outputs == [{}, {}, {}]


def test_the_output_type_is_a_bare_name() -> None:
    assert output_of(word="package.module:ArrayRecord").loss_fn_output_type == "ArrayRecord"
    assert output_of().loss_fn_output_type == "ArrayRecord"


@pytest.mark.parametrize(
    ("bounds", "more", "reason"),
    [
        ([0, 8, 4], {}, "offsets do not rise"),
        ([0, 12], {}, "offsets do not rise"),
        ([-4, 8], {}, "offsets do not rise"),
        ([0, 3], {}, "3 bytes are not a whole number"),
        ([0, 8], {"trailing_shape": [3]}, "does not hold 2 values"),
        ([0, 8], {"dtype": 9}, "unknown dtype 9"),
        ([0, 8], {"offsets": b"123"}, "3 bytes"),
    ],
)
def test_an_output_that_does_not_fit_is_refused_by_name(bounds: list[int], more: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=f"'logprobs': .*{reason}"):
        output_of(record(bytes(8), bounds, **more))


def test_outputs_of_different_lengths_are_refused() -> None:
    odd = record(bytes(8), [0, 4, 8])
    odd.num_datums = 3
    with pytest.raises(ValidationError, match="2 entries for 3 datums"):
        output_of(odd)


def test_a_sparse_output_is_refused() -> None:
    sparse = TensorData([1], "int64", [1, 2], [0, 1], [0])
    output = ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=[{"a": sparse}], metrics={})
    with pytest.raises(ValidationError, match="'a' is sparse"):
        proto_codec.encode_forward_backward_output(output)


# ── Samples

sequences = st.builds(
    lambda reason, pairs, with_logprobs: SampledSequence(
        stop_reason=reason,
        tokens=[token for token, _ in pairs],
        **cast("dict[str, Any]", {"logprobs": [value for _, value in pairs]} if with_logprobs else {}),
    ),
    st.sampled_from(["stop", "length"]),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), float32s), max_size=5),
    st.booleans(),
)


@given(
    st.lists(sequences, max_size=3),
    st.none() | st.lists(st.none() | float32s, max_size=5),
    st.integers(0, 2**31 - 1),
    st.none() | tensors(),
)
def test_a_sample_reads_back_as_it_was(
    drawn: list[SampledSequence], prompt_logprobs: list[float | None] | None, hits: int, targets: TensorData | None
) -> None:
    response = SampleResponse(
        drawn, prompt_logprobs=prompt_logprobs, prompt_cache_hit_tokens=hits, target_prompt_logprobs=targets
    )
    content = proto_codec.encode_sample_response(response)
    read = proto_codec.decode_sample_response(content)
    assert read == response
    # What came packed goes out packed: the same bytes, without a list in between.
    assert proto_codec.encode_sample_response(proto_codec.decode_sample_response(content)) == content


def test_alternatives_and_top_k_matrices_read_back_as_they_were() -> None:
    rows: Any = [None, [(5, -0.5), (6, -1.5)], [(7, -0.25)]]
    sequence = SampledSequence(stop_reason="stop", tokens=[1, 2, 3], topk_logprobs=rows)
    alternatives = PromptAltTokens(TensorData([[1, 2]], "int64"), TensorData([[-0.5, -1.5]], "float32"))
    response = SampleResponse([sequence], topk_prompt_logprobs=rows, prompt_alt_tokens=alternatives)
    content = proto_codec.encode_sample_response(response)
    read = proto_codec.decode_sample_response(content)
    assert read == response
    assert read.sequences[0].topk_logprobs == rows
    filler = pb.SampleResponse.FromString(content).topk_prompt_logprobs
    assert struct.unpack("<6f", filler.logprobs) == (-99999.0, -99999.0, -0.5, -1.5, -0.25, -99999.0)


def test_an_empty_top_k_matrix_means_that_none_was_asked_for() -> None:
    message = pb.SampleResponse(topk_prompt_logprobs=pb.TopkLogprobs())
    assert proto_codec.decode_sample_response(message.SerializeToString()).topk_prompt_logprobs is None


def test_an_empty_record_more_than_datums_is_not_refused() -> None:
    """Before: a service that ends its records with an empty one, as it may, lost a result that was paid for."""
    full = pb.ArrayRecord(num_datums=2)
    content = pb.ForwardBackwardOutput(loss_fn_outputs=[full, pb.ArrayRecord(), pb.ArrayRecord()]).SerializeToString()
    assert proto_codec.decode_forward_backward_output(content, asked=2).loss_fn_outputs == [{}, {}]


def test_sequences_get_the_ids_that_the_service_named_on_acceptance() -> None:
    content = pb.SampleResponse(sequences=[pb.SampledSequence(), pb.SampledSequence()]).SerializeToString()
    read = proto_codec.decode_sample_response(content, ["r:0", "r:1"])
    assert [sequence.sequence_id for sequence in read.sequences] == ["r:0", "r:1"]
    short = proto_codec.decode_sample_response(content, ["r:0"])
    assert [sequence.sequence_id for sequence in short.sequences] == ["r:0", ""]


def test_a_stop_reason_of_a_newer_service_never_crashes_a_result() -> None:
    content = b"\x0a\x02\x08\x07"  # one sequence with stop reason 7
    (sequence,) = proto_codec.decode_sample_response(content).sequences
    assert (sequence.stop_reason, sequence.raw_stop_reason) == ("stop", "7")


def test_numbers_cut_in_the_middle_are_refused() -> None:
    content = pb.SampleResponse(sequences=[pb.SampledSequence(tokens=b"12345")]).SerializeToString()
    with pytest.raises(ValidationError, match="5 bytes are not a whole number"):
        proto_codec.decode_sample_response(content)


def test_a_top_k_matrix_of_the_wrong_size_is_refused() -> None:
    topk = pb.TopkLogprobs(token_ids=bytes(8), logprobs=bytes(8), k=3, length=1)
    content = pb.SampleResponse(topk_prompt_logprobs=topk).SerializeToString()
    with pytest.raises(ValidationError, match="1 x 3"):
        proto_codec.decode_sample_response(content)


def test_a_type_that_never_travels_as_protobuf_is_refused() -> None:
    with pytest.raises(ValidationError, match="TopkLogprobs does not travel as protobuf"):
        proto_codec.decode_answer(b"", TopkLogprobs)


# ── The writer and the generated module


@given(st.integers(-(2**63), 2**63 - 1))
def test_integers_are_written_as_protobuf_reads_them(value: int) -> None:
    content = proto_writer.integer(2, value)
    assert pb.PromptProvenanceSpan.FromString(content).offset == value
    assert pb.PromptProvenanceSpan(offset=value).SerializeToString() == content


def test_the_generated_module_matches_its_proto_file() -> None:
    script = ROOT / "scripts/generate_pb2.py"
    check = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr


def test_the_codec_loads_protobuf_and_nothing_else_that_is_heavy() -> None:
    probe = "import sys, tinkex.wire.proto_codec; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    assert "google" in loaded
    assert not {"numpy", "torch", "transformers", "grpc_tools", "pydantic"} & set(loaded)
