"""A large datum of a JSON body: its long lists of numbers are read in pieces and packed, and mean the same."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.errors import ValidationError
from tinkex.server.http import fields
from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.fields import DatumReader, parse_json_object, parse_json_pass
from tinkex.server.routes import training
from tinkex.types import packed
from tinkex.types.inputs import Datum, EncodedTextChunk
from tinkex.types.number_pieces import PIECE_NUMBERS, NumberPieces

NUMBERS = (
    st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.booleans()
)
KEYS = st.sampled_from(["tokens", "data", "weights", "sparse_col_indices", "shape", "a", '"', "\\tokens"])
VALUES = st.recursive(
    NUMBERS | st.text() | st.lists(NUMBERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture
def in_tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large, and a piece has a few bytes."""
    for name, value in {"UNCUT_BYTES": 0, "LONG_LIST_BYTES": 3, "PIECE_BYTES": 4}.items():
        monkeypatch.setattr(fields, name, value)


def listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: listed(entry) for key, entry in value.items()}
    return [listed(entry) for entry in value] if isinstance(value, (list, NumberPieces)) else value


def body_of(datum: bytes) -> bytes:
    return b'{"forward_input": {"loss_fn": "cross_entropy", "data": [' + datum + b']}, "model_id": "m", "seq_id": 1}'


@pytest.mark.usefixtures("in_tiny_pieces")
def test_a_datum_read_in_pieces_is_the_same_as_whole() -> None:
    @settings(max_examples=150)
    @given(st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from([None, 1]))
    def check(datum: dict[str, Any], indent: int | None) -> None:
        text = json.dumps(datum, indent=indent).encode()
        try:
            whole = parse_json_object(body_of(text))
        except RequestRejected:  # half a character
            return
        body, error = parse_json_pass(body_of(text), "forward_input")
        assert error is None
        assert listed(body) == whole

    check()


@pytest.mark.usefixtures("in_tiny_pieces")
@pytest.mark.parametrize(
    "numbers", ["1,", "1,2,3,4,5,", ",1,2,3", "1,2,,,,,3", "1 2", "1,2,3,4,5x", "1,2,3,4,t", "--1"]
)
def test_a_list_that_is_not_json_is_rejected(numbers: str) -> None:
    with pytest.raises(RequestRejected, match="not JSON"):
        parse_json_pass(body_of(b'{"tokens": [%s]}' % numbers.encode()), "forward_input")


@pytest.mark.usefixtures("in_tiny_pieces")
def test_a_text_that_looks_like_a_list_read_in_pieces_stays_a_text() -> None:
    datum = {"tokens": [1, 2, 3, 4], "a": "0" * 32 + " 0", "b": ["0" * 32 + " 0"]}
    body, _ = parse_json_pass(body_of(orjson.dumps(datum)), "forward_input")
    assert listed(body)["forward_input"]["data"] == [datum]


def datum_of(tokens: list[Any], data: list[Any], **tensor: Any) -> dict[str, Any]:
    chunk = {"tokens": tokens, "type": "encoded_text"}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": {"data": data, **tensor}}}


@pytest.mark.usefixtures("in_tiny_pieces")
@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "int64"},
        {"dtype": "float32"},
        {"dtype": "int64", "shape": [4, 10]},
        {
            "dtype": "int64",
            "shape": [2, 60],
            "sparse_crow_indices": [0, 20, 40],
            "sparse_col_indices": [*range(20)] * 2,
        },
    ],
)
def test_packed_numbers_are_the_same(tensor: dict[str, Any]) -> None:
    datum = datum_of([*range(300, 340)], [*range(1000, 1040)], **tensor)
    body, _ = parse_json_pass(body_of(orjson.dumps(datum)), "forward_input", DatumReader(Datum))
    assert body["forward_input"]["data"] == [Datum.model_validate(datum)]


@pytest.mark.usefixtures("in_tiny_pieces")
@pytest.mark.parametrize(
    "datum",
    [
        datum_of([*range(40), -1], [1], dtype="int64"),
        datum_of([*range(40), 1.5], [1], dtype="int64"),
        datum_of([*range(40), True], [1], dtype="int64"),
        datum_of([*range(40)], [*range(40), 1.5], dtype="int64"),
        datum_of([*range(40)], [*range(40), 2**63], dtype="int64"),
        datum_of([*range(40)], [*range(40), 1e39], dtype="float32"),
        datum_of([*range(40)], [*range(40), None], dtype="float32"),
        datum_of([*range(40)], [*range(40)], dtype="float32", shape=[41]),
    ],
)
def test_errors_name_the_same_place(datum: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    good = datum_of([*range(40)], [*range(40)], dtype="int64")
    content = body_of(b",".join(map(orjson.dumps, [good, datum, good])))
    whole = training._read_json(content, "forward").error
    monkeypatch.setattr(training, "IN_THREAD_BYTES", 0)
    in_pieces = training._read_json(content, "forward").error
    assert whole is not None and in_pieces is not None
    assert "data[1]" in whole.detail
    assert (in_pieces.code, in_pieces.detail) == (whole.code, whole.detail)


def test_a_list_in_a_field_of_another_type_is_named() -> None:
    numbers = NumberPieces(3, lambda: iter([[1, 2], [3]]))
    with pytest.raises(ValidationError, match="3 entries"):
        Datum.model_validate({"model_input": numbers})
    with pytest.raises(ValidationError, match="expected a chunk"):
        Datum.model_validate({"model_input": {"chunks": numbers}})
    assert numbers[2] == 3
    with pytest.raises(IndexError):
        numbers[3]


def test_a_body_of_too_many_numbers_is_rejected_and_its_run_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in {"MAX_ELEMENTS": 100, "MAX_INDICES": 10}.items():
        with monkeypatch.context() as patch:
            patch.setattr(fields, name, limit)
            patch.setattr(training, "IN_THREAD_BYTES", 0)
            indices = {"sparse_crow_indices": [0, 40], "sparse_col_indices": [*range(40)], "shape": [1, 60]}
            datum = datum_of([*range(40)], [*range(40)], dtype="int64", **indices)
            for uncut in (0, 1 << 20):
                patch.setattr(fields, "UNCUT_BYTES", uncut)
                patch.setattr(fields, "LONG_LIST_BYTES", 3)
                read = training._read_json(body_of(orjson.dumps(datum)), "forward")
                assert read.error is not None
                assert (read.error.code, read.model_id, read.seq_id) == ("too_many", "m", 1)


def test_lists_beyond_one_piece_are_packed_the_same() -> None:
    values = [*range(PIECE_NUMBERS + 5)]
    pieces = NumberPieces(len(values), lambda: iter([values[:7], values[7:]]))
    assert packed.unpack("i", packed.pack_tokens(values)) == values
    assert packed.unpack("q", packed.pack_ints([*map(float, values)])) == values
    assert packed.unpack("f", packed.pack_floats(values)) == values
    assert packed.unpack("q", packed.widen_ints(packed.pack_tokens(values))) == values
    assert packed.widen_ints(b"") == b""
    for pack in (packed.pack_tokens, packed.pack_ints, packed.pack_floats):
        assert pack(pieces) == pack(values)


def test_a_chunk_with_a_type_keeps_no_list() -> None:
    """A token in a list takes 40 bytes, packed it takes 4: passes kept both until they were submitted."""
    chunk = EncodedTextChunk.model_validate({"tokens": [1, 2, 3], "type": "encoded_text"})
    with pytest.raises(AttributeError):
        object.__getattribute__(chunk, "tokens")
    assert chunk.model_dump(exclude_unset=True) == {"tokens": [1, 2, 3], "type": "encoded_text"}
    with pytest.raises(ValidationError):
        EncodedTextChunk.model_validate({"tokens": [1], "type": "image"})
