"""JSON: three states per field, no silent NaN, and answers that do not fit say why."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import APIResponseValidationError, ValidationError
from tinkex.types import CreateModelResponse, LoraConfig, SamplingParams
from tinkex.wire.dialect import Dialect
from tinkex.wire.json_codec import decode, dump, encode, read, read_content

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=12,
)


@given(plain)
def test_what_is_encoded_reads_back_the_same(value: object) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nan_is_refused_with_its_place_instead_of_becoming_null(bad: float) -> None:
    with pytest.raises(ValidationError, match=r"adam_params\.betas\[1\] is -?(nan|inf)"):
        encode({"seq_id": None, "adam_params": {"betas": [0.5, bad]}})


def test_a_null_that_was_meant_is_sent() -> None:
    assert encode({"seed": None, "rank": 1.5}) == b'{"seed":null,"rank":1.5}'


def test_what_json_cannot_carry_is_refused_with_a_reason() -> None:
    with pytest.raises(ValidationError, match=r"cannot be sent as JSON.*set"):
        encode({"tags": {1}})
    with pytest.raises(ValidationError, match="64-bit"):
        encode(2**70)


def test_the_literals_that_python_services_write_are_read() -> None:
    assert decode(b'{"loss": Infinity, "other": -Infinity}') == {"loss": math.inf, "other": -math.inf}
    assert math.isnan(decode(b"[NaN]")[0])


@pytest.mark.parametrize("broken", [b"", b"{", b"<html>Infinity</html>", b"\xff", b"[" * 5000])
def test_broken_json_is_a_value_error(broken: bytes) -> None:
    with pytest.raises(ValueError):
        decode(broken)


def test_an_untouched_field_is_absent_and_an_explicit_none_is_null_in_the_json_dialect() -> None:
    assert dump(LoraConfig(rank=8), Dialect.JSON) == {"rank": 8}
    assert dump(LoraConfig(rank=8, seed=None), Dialect.JSON) == {"rank": 8, "seed": None}
    assert dump(LoraConfig(rank=8, seed=7), Dialect.JSON) == {"rank": 8, "seed": 7}


def test_defaults_are_sent_and_none_is_dropped_in_the_proto_dialect() -> None:
    flags = {"train_unembed": True, "train_mlp": True, "train_attn": True}
    assert dump(LoraConfig(rank=8, seed=None), Dialect.PROTO) == {"rank": 8, **flags}
    assert dump(SamplingParams(), Dialect.PROTO) == {"temperature": 1, "top_k": -1, "top_p": 1}


def test_fields_travel_in_the_order_of_declaration_whatever_the_caller_did() -> None:
    assert list(dump(LoraConfig(train_attn=False, seed=1, rank=2), Dialect.JSON)) == ["rank", "seed", "train_attn"]


def test_an_answer_without_a_required_field_names_it() -> None:
    with pytest.raises(APIResponseValidationError, match="needs 'model_id'") as caught:
        read(CreateModelResponse, {"type": "create_model"})
    assert caught.value.body == {"type": "create_model"}


def test_an_answer_with_fields_nobody_knows_is_read() -> None:
    assert read(CreateModelResponse, {"model_id": "m", "brand_new": 1}) == CreateModelResponse(model_id="m")


def test_an_answer_that_is_no_json_shows_its_beginning() -> None:
    with pytest.raises(APIResponseValidationError, match=r"33 bytes that are not JSON: '<html>Bad gateway"):
        read_content(CreateModelResponse, b"<html>Bad gateway</html>" + b" " * 9)
