"""Counting the elements of a body, and cutting it into datums, before it is decoded."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.errors import ValidationError
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.scan import check_message_fields, count_json_containers, split_json_datums

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


@given(st.binary(max_size=300))
def test_any_bytes_are_counted_or_left_to_the_decoder(content: bytes) -> None:
    try:
        check_message_fields(content, 3, max_messages=20, max_fields=20, what="datums")
    except ValidationError as error:
        assert "more than 20" in str(error)
