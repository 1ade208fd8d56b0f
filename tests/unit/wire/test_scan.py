"""Counting the elements of a body, and cutting it into datums, before it is decoded."""

from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.errors import ValidationError
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.scan import check_message_fields, count_json_containers, find_json_numbers, split_json_datums

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("data"), inner, max_size=4),
    max_leaves=20,
)
DATUMS = st.lists(st.dictionaries(st.text() | st.sampled_from(["data", "forward_input"]), VALUES), max_size=5)


def joined(pieces: Any) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(pieces.envelope)
    assert body["forward_input"]["data"] == []
    body["forward_input"]["data"] = [orjson.loads(datum) for datum in pieces.datums]
    return body


@settings(max_examples=40)
@given(DATUMS, st.dictionaries(st.text(), VALUES, max_size=3), VALUES, st.sampled_from([None, 1]))
def test_pieces_of_a_body_are_its_datums(
    datums: list[Any], others: dict[str, Any], loss: Any, indent: int | None
) -> None:
    body = {**others, "forward_input": {"loss": loss, "data": datums, "more": others}, "model_id": "m"}
    content = json.dumps(body, indent=indent).encode()
    pieces = split_json_datums(content, b"forward_input")
    assert pieces is not None
    assert len(pieces.datums) == len(datums)
    assert joined(pieces) == body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"forward_input": {"data": 1}}',
        b'{"forward_input": {"data": [1, 2]}}',
        b'{"forward_input": {"data": [[], {}]}}',
        b'{"forward_input": {"data": [{} {}]}}',
        b'{"forward_input": {"data": [{}, ]}}',
        b'{"forward_input": {"data": ["x"]}}',
        b'{"forward_input": {"data": [{"a": "}',
        b'{"other": {"data": [{}]}}',
        b'{"other": {"forward_input": {"data": [{}]}}}',
        b'["forward_input", {"data": [{}]}]',
        b'{"forward_input", {"data": [{}]}}',
        b"]]]]",
        b'"' * 7,
    ],
)
def test_a_body_of_another_form_is_left_to_the_parser(content: bytes) -> None:
    assert split_json_datums(content, b"forward_input") is None


@pytest.mark.timing
def test_many_lists_far_behind_their_key_do_not_take_minutes() -> None:
    """Before: each list was compared with all text since the last key, 1.3 s for these 2.5 MB, ten times that for 8."""
    content = b'{"forward_input": {"x": [' + (b"[" + b"1," * 40 + b"1],") * 30_000 + b"[]]}}"
    began = time.monotonic()
    assert split_json_datums(content, b"forward_input") is None
    assert find_json_numbers(content, [b"x"], 2) == []
    assert time.monotonic() - began < 0.6


@given(VALUES)
def test_containers_are_counted_or_overestimated(value: Any) -> None:
    def count(node: Any) -> int:
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else None
        return 0 if children is None else 1 + sum(map(count, children))

    assert count_json_containers(orjson.dumps(value)) >= count(value)


def request(datums: int, chunks: int = 1) -> bytes:
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\x01\0\0\0" * 40))
    content: bytes = pb.ForwardBackwardRequest(
        model_id="m", seq_id=7, data=[pb.Datum(model_input=[chunk] * chunks)] * datums
    ).SerializeToString()
    return content


def test_datums_of_a_protobuf_body_are_counted() -> None:
    check_message_fields(request(10), 3, max_messages=10, max_fields=10, what="datums")
    with pytest.raises(ValidationError, match="more than 9 datums"):
        check_message_fields(request(10), 3, max_messages=9, max_fields=10, what="datums")


def test_fields_inside_of_datums_are_counted() -> None:
    check_message_fields(request(2, chunks=50), 3, max_messages=10, max_fields=100, what="datums")
    with pytest.raises(ValidationError, match="more than 99 fields"):
        check_message_fields(request(2, chunks=50), 3, max_messages=10, max_fields=99, what="datums")


def datum_of(tensor: bytes) -> bytes:
    def field(number: int, content: bytes) -> bytes:
        assert len(content) < 1 << 14
        return bytes([number << 3 | 2, len(content) & 0x7F | 0x80, len(content) >> 7]) + content

    return field(3, field(2, field(1, b"weights") + field(2, tensor)))


def check(content: bytes, max_elements: int) -> None:
    check_message_fields(content, 3, 1024, 1000, "datums", pb.Datum.DESCRIPTOR, max_elements)


def packed_extents(count: int) -> bytes:
    return bytes([4 << 3 | 2, count & 0x7F | 0x80, count >> 7]) + b"\x01" * count


@pytest.mark.parametrize(
    "tensor",
    [
        packed_extents(2000),
        b"\x20\x01" * 2000,  # each number with its own tag
        b"\x18\x01" * 50 + b"\xa0\x00\x01" * 2000,  # a tag in two bytes
        packed_extents(10) * 100,
        b"\x0a\x90\x4e" + bytes(10_000) + packed_extents(2000),
    ],
    ids=["packed", "unpacked", "long tags", "in many lists", "behind numbers"],
)
def test_extents_of_a_shape_are_counted(tensor: bytes) -> None:
    """Before: a body of 16 MB with one tensor became 590 MB, and 256 MB of it some 10 GB."""
    content = datum_of(tensor)
    extents = pb.ForwardBackwardRequest.FromString(content).data[0].loss_fn_inputs["weights"].shape
    assert len(extents) >= 1000
    with pytest.raises(ValidationError, match="more than 999 elements"):
        check(content, 999)


@pytest.mark.parametrize("order", [(1, 3, 4), (4, 3, 1)])
def test_numbers_of_a_tensor_are_not_elements(order: tuple[int, ...]) -> None:
    fields = {1: b"\x0a\x90\x4e" + bytes(10_000), 3: b"\x18\x01", 4: b"\x22\x02\xc4\x13"}
    content = datum_of(b"".join(fields[number] for number in order))
    assert pb.ForwardBackwardRequest.FromString(content).data[0].loss_fn_inputs["weights"].shape == [2500]
    check(content * 10, 600)
    with pytest.raises(ValidationError, match="more than 50 elements"):
        check(content * 10, 50)


@given(st.binary(max_size=300))
def test_any_bytes_are_counted_or_left_to_the_decoder(content: bytes) -> None:
    try:
        check_message_fields(content, 3, 20, 20, "datums", pb.Datum.DESCRIPTOR, 20)
    except ValidationError as error:
        assert "more than 20" in str(error)
