"""Every codec on any bytes: a value or the documented error, whatever arrives. Round trips are with each codec."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.damage import damaged
from tests.unit.wire.test_proto_codec import configs, datums, ids, sequences, tensors
from tinkex.errors import APIResponseValidationError, ValidationError
from tinkex.types import (
    CheckpointsListResponse,
    ClientConfigResponse,
    CreateSessionResponse,
    ForwardBackwardOutput,
    GetServerCapabilitiesResponse,
    ParsedCheckpointTinkerPath,
    SampleResponse,
    TensorData,
)
from tinkex.wire import envelope, json_codec, proto_codec, proto_writer, sse
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.body import JSON, PROTOBUF, Body, compress, decompress
from tinkex.wire.scan import check_message_elements, check_message_fields, count_json_elements, is_json_deeper_than
from tinkex.wire.sse import SSEDecoder

FEW = settings(max_examples=80)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
NAMES = st.sampled_from(
    [
        "sequences",
        "loss_fn_outputs",
        "metrics",
        "type",
        "error",
        "category",
        "status",
        "request_id",
        "sample_sequence_ids",
        "model_id",
        "tokens",
        "logprobs",
        "stop_reason",
        "data",
        "dtype",
        "shape",
        "supported_models",
        "checkpoints",
        "session_id",
        "queue_state",
        "response_payload_size",
    ]
)
OBJECTS = st.dictionaries(
    NAMES,
    VALUES
    | st.lists(st.dictionaries(NAMES, VALUES, max_size=4), max_size=3)
    | st.sampled_from(["sample", "try_again", "complete_metadata", "stop"]),
    max_size=6,
)
JSON_TEXTS = (OBJECTS | VALUES).map(lambda value: json.dumps(value).encode())
RESULTS = [
    SampleResponse,
    ForwardBackwardOutput,
    ClientConfigResponse,
    CreateSessionResponse,
    GetServerCapabilitiesResponse,
    CheckpointsListResponse,
]


# -- JSON -------------------------------------------------------------------------------------------------------------


@FEW
@given(JSON_TEXTS | damaged(JSON_TEXTS) | st.binary(max_size=40))
def test_any_bytes_are_json_or_an_error_that_shows_them(content: bytes) -> None:
    try:
        json_codec.decode_answer(content)
    except APIResponseValidationError as error:
        assert len(str(error)) < 1200


@FEW
@given(JSON_TEXTS | damaged(JSON_TEXTS), st.sampled_from(RESULTS), st.integers(0, 3))
def test_any_json_is_a_result_or_the_documented_error(content: bytes, kind: Any, asked: int) -> None:
    for status in (200, 408):
        try:
            envelope.read(status, {"content-type": JSON}, content, kind, "r-1", ["a"], asked)
        except APIResponseValidationError:
            pass
    try:
        envelope.read_accepted(content)
    except APIResponseValidationError:
        pass


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("leaf", [b"1", b"NaN"])
@pytest.mark.parametrize("depth", [101, 900, 1100, 100_000])
def test_json_too_deep_for_python_is_rejected_with_words(opening: bytes, leaf: bytes, depth: int) -> None:
    closing = opening.replace(b'"a":', b"").translate(bytes.maketrans(b"[{", b"]}"))[::-1]
    with pytest.raises(APIResponseValidationError):
        json_codec.decode_answer(opening * depth + leaf + closing * depth)


def test_json_of_a_hundred_levels_is_read_whatever_its_strings_hold() -> None:
    obj = orjson.loads(b"[" * 100 + b'"' + b"[[[[" * 50 + b'"' + b"]" * 100)
    assert json_codec.decode_answer(orjson.dumps(obj)) == obj


HOSTILE_TEXTS = st.text(st.sampled_from('[]{}"\\,:a'), max_size=6)
NESTED = st.recursive(
    HOSTILE_TEXTS | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE_TEXTS, inner, max_size=3),
    max_leaves=20,
)


@FEW
@given(NESTED, st.integers(0, 6), st.sampled_from([None, 1]))
def test_depth_is_exact_whatever_the_strings_hold(value: Any, levels: int, indent: int | None) -> None:
    def depth(node: Any) -> int:
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else None
        return 0 if children is None else 1 + max(map(depth, children), default=0)

    assert is_json_deeper_than(json.dumps(value, indent=indent).encode(), levels) == (depth(value) > levels)


def test_a_million_tokens_with_their_twenty_likeliest_are_not_too_many() -> None:
    """Before: 33 million elements were the most, and such a result has 82 million. A tenth of it is counted here."""
    likeliest = orjson.dumps([[[token, -1.5] for token in range(20)]] * 100_000)
    assert len(likeliest) * 10 < json_codec.MAX_JSON_BYTES
    assert count_json_elements(likeliest) * 10 < json_codec.MAX_ELEMENTS


def test_json_of_two_bytes_per_list_is_counted_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_codec, "MAX_ELEMENTS", 1 << 20)
    content = b"[" + b"[]," * (1 << 19) + b"[]]"
    tracemalloc.start()
    try:
        with pytest.raises(APIResponseValidationError, match="more than 1,048,576 elements"):
            json_codec.decode_answer(content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# -- protobuf ---------------------------------------------------------------------------------------------------------

REQUESTS = st.builds(
    proto_codec.encode_forward_backward, ids, st.integers(0, 2**31 - 1), st.lists(datums, max_size=2), ids, configs
)
SAMPLES = st.builds(
    lambda drawn, targets: proto_codec.encode_sample_response(SampleResponse(drawn, target_prompt_logprobs=targets)),
    st.lists(sequences, max_size=3),
    st.none() | tensors(),
)
OUTPUTS = st.lists(
    st.dictionaries(st.sampled_from("ab"), tensors().filter(lambda t: not t.is_sparse), max_size=2), max_size=3
).map(
    lambda rows: proto_codec.encode_forward_backward_output(
        ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=rows, metrics={"loss:sum": 1.5})
    )
)


@FEW
@given(damaged(REQUESTS) | damaged(SAMPLES) | damaged(OUTPUTS))
def test_any_damaged_protobuf_is_a_value_or_a_validation_error(content: bytes) -> None:
    for decode in (
        proto_codec.decode_forward_backward_request,
        proto_codec.decode_forward_backward_output,
        proto_codec.decode_sample_response,
    ):
        try:
            value: Any = decode(content)
            repr(value)
        except ValidationError:
            pass
    proto_codec.peek_forward_backward_request(content)


@FEW
@given(damaged(SAMPLES) | damaged(OUTPUTS), st.sampled_from(RESULTS), st.integers(0, 3))
def test_any_protobuf_result_has_at_most_what_was_asked_for(content: bytes, kind: Any, asked: int) -> None:
    try:
        done: Any = envelope.read(200, {"content-type": PROTOBUF}, content, kind, "r-1", ["a"], asked)
    except APIResponseValidationError:
        return
    results = done.value.sequences if kind is SampleResponse else done.value.loss_fn_outputs
    assert len(results) <= asked


@FEW
@given(SAMPLES | OUTPUTS | REQUESTS)
def test_what_we_write_has_fewer_elements_than_bytes(content: bytes) -> None:
    for kind in (pb.SampleResponse, pb.ForwardBackwardOutput, pb.ForwardBackwardRequest):
        check_message_elements(content, kind.DESCRIPTOR, len(content) + 1)


@FEW
@given(st.binary(max_size=60) | damaged(REQUESTS))
def test_looking_at_any_bytes_is_harmless(content: bytes) -> None:
    for look in (
        lambda: check_message_elements(content, pb.SampleResponse.DESCRIPTOR, 20),
        lambda: check_message_fields(content, proto_codec.DATUMS, 2, 20, "datums"),
    ):
        try:
            look()
        except ValidationError as error:
            assert error.code == "too_many"


def test_datums_behind_a_group_are_counted() -> None:
    """Decoders skip a group, and so did the count: with all that came after it."""
    datums_1000 = bytes((proto_codec.DATUMS << 3 | 2, 0)) * 1000
    content = b"\xfb\x01\xfc\x01" + datums_1000  # field 31: a group begins and ends
    assert len(pb.ForwardBackwardRequest.FromString(content).data) == 1000
    with pytest.raises(ValidationError, match="more than 10 datums"):
        check_message_fields(content, proto_codec.DATUMS, 10, 100, "datums")


def test_fields_that_nobody_knows_do_not_make_the_count_endless() -> None:
    with pytest.raises(ValidationError, match="more than 100 fields"):
        check_message_fields(b"\xf8\x01\x00" * 1000, proto_codec.DATUMS, 10, 100, "datums")


@pytest.mark.parametrize(
    "shape", [[1 << 40, 0], [0, 1 << 62], [1] * 65, [-1, -1], [-(1 << 62)]], ids=lambda shape: f"{shape[:2]}"
)
def test_an_absurd_shape_is_rejected_before_anything_is_made_of_it(shape: list[int]) -> None:
    tensor = pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=shape)
    content = pb.SampleResponse(target_prompt_logprobs=tensor).SerializeToString()
    with pytest.raises(ValidationError):
        proto_codec.decode_sample_response(content)


def test_a_sparse_tensor_that_would_fill_the_memory_is_rejected() -> None:
    sparse = TensorData([], "float32", [1, 1 << 40], [0, 0], [])
    content = proto_codec.encode_sample_response(SampleResponse([], target_prompt_logprobs=sparse))
    with pytest.raises(ValidationError, match="more than 268,435,456 numbers"):
        proto_codec.decode_sample_response(content)


@FEW
@given(st.integers(1, 15), st.integers(-(2**63), 2**64 - 1), st.text(st.characters(exclude_categories=["Cs"])))
def test_what_the_writer_writes_the_scan_finds(field: int, number: int, text: str) -> None:
    parts = [proto_writer.integer(field, number, keep_default=True), proto_writer.text(field, text, keep_default=True)]
    check_message_elements(b"".join(parts), pb.SampleResponse.DESCRIPTOR, 2 + len(text.encode()) * 2)


def test_half_a_character_is_rejected_with_words() -> None:
    with pytest.raises(ValidationError, match="half a character"):
        proto_codec.encode_forward_backward("\ud800", 1, [], "cross_entropy")


# -- streams, bodies, paths -------------------------------------------------------------------------------------------


@FEW
@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"data: x\n", b"\n", b"event: a\r", b"\r\n"]), max_size=20))
def test_any_pieces_of_a_stream_are_events(pieces: list[bytes]) -> None:
    decoder = SSEDecoder()
    for piece in pieces:
        for event in decoder.feed(piece):
            assert "\r" not in event.data and event.event


@FEW
@given(st.text(), st.text())
def test_an_event_reads_back_as_it_was_sent(name: str, data: str) -> None:
    try:
        content = sse.encode(name, data)
    except (ValueError, UnicodeEncodeError):
        return
    (event,) = SSEDecoder().feed(content)
    assert event == (name or "message", data.replace("\r\n", "\n").replace("\r", "\n"))


@pytest.mark.parametrize("piece", [b"data: xxxxxxxx", b"xx", b"data: x\n", b"data:\n", b"event: x\n"])
def test_an_event_beyond_the_limit_is_rejected_however_it_comes(piece: bytes) -> None:
    decoder = SSEDecoder(limit_bytes=10_000)
    with pytest.raises(APIResponseValidationError, match="more than 10,000 bytes"):
        for _ in range(10_000):
            decoder.feed(piece)


def test_events_below_the_limit_may_go_on_for_ever() -> None:
    decoder = SSEDecoder(limit_bytes=1000)
    assert sum(len(decoder.feed(b": ping\n\ndata: x\n\n")) for _ in range(1000)) == 1000


PLAIN = st.binary(max_size=300) | st.binary(max_size=9).map(lambda piece: piece * 1000)
FOLDED = PLAIN.map(lambda plain: compress(Body(plain)).content) | PLAIN.map(
    lambda plain: zlib.compress(plain, wbits=31)
)


@FEW
@given(FOLDED | damaged(FOLDED) | st.binary(max_size=40), st.sampled_from(["zstd", "gzip", "x-gzip"]))
def test_any_compressed_body_unfolds_within_the_limit_or_is_rejected(content: bytes, encoding: str) -> None:
    try:
        assert len(decompress(content, encoding, limit_bytes=500)) <= 500
    except ValidationError:
        pass


@FEW
@given(PLAIN)
def test_a_body_unfolds_to_what_was_compressed(plain: bytes) -> None:
    assert decompress(compress(Body(plain)).content, "zstd") == plain
    assert decompress(zlib.compress(plain, wbits=31), "gzip") == plain


PARTS = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=8)
KINDS = st.sampled_from(["weights", "sampler_weights", "external_weights"])


@FEW
@given(PARTS, KINDS, PARTS)
def test_a_path_reads_back_as_its_parts(run: str, kind: str, name: str) -> None:
    path = f"tinker://{run}/{kind}/{name}"
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert (parsed.training_run_id, parsed.checkpoint_id, parsed.tinker_path) == (run, f"{kind}/{name}", path)


@FEW
@given(st.text() | st.lists(PARTS | KINDS | st.just("tinker:") | st.just(""), max_size=6).map("/".join))
def test_any_text_is_a_path_or_a_validation_error(text: str) -> None:
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(text)
    except ValidationError:
        return
    assert f"tinker://{parsed.training_run_id}/{parsed.checkpoint_id}" == text
