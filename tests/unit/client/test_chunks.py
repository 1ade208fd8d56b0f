"""Cutting the data of a call into requests, and joining their results."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client._calls.chunks import JSON_LIMITS, count_numbers, estimate, join, split
from tinkex.types import ClientConfigResponse
from tinkex.types.inputs import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)
from tinkex.types.tensor import TensorData
from tinkex.types.training import ForwardBackwardOutput

SERVER = ClientConfigResponse()
"""What a service announces that sets no limits of its own."""


def datum(tokens: int = 4) -> Datum:
    return Datum(ModelInput.from_ints([1] * tokens), {"target_tokens": [1] * tokens, "weights": [1.0] * tokens})


def test_a_datum_is_estimated_at_four_bytes_a_token_and_the_bytes_of_its_tensors() -> None:
    assert estimate(datum(10)) == 10 * 4 + 10 * 8 + 10 * 4


def test_a_sparse_tensor_counts_its_values_and_eight_bytes_an_index() -> None:
    sparse = TensorData([5, 6, 7], "int64", [4, 100], [0, 1, 1, 2, 3], [0, 50, 99])
    assert estimate(Datum(ModelInput.from_ints([1] * 4), {"target_tokens": sparse})) == 4 * 4 + 3 * 8 + (5 + 3) * 8


def test_images_and_audio_count_their_bytes() -> None:
    chunks: list[ModelInputChunk] = [
        EncodedTextChunk(tokens=[1, 2]),
        ImageChunk(data=b"x" * 1000, format="png", expected_tokens=7),
        ImageAssetPointerChunk(format="png", location="s3://bucket/a.png"),
        DmelChunk(dmel=b"y" * 500),
    ]
    assert estimate(Datum(ModelInput(chunks=chunks))) == 8 + 1000 + 17 + 500


def test_the_json_dialect_counts_numbers() -> None:
    assert count_numbers(datum(10)) == 30
    image = ImageChunk(data=b"x" * 8, format="png", tokens=100)
    assert count_numbers(Datum(ModelInput(chunks=[image]))) == 100


def test_large_images_count_in_the_json_dialect_too() -> None:
    photograph = Datum(ModelInput(chunks=[ImageChunk(data=bytes(1_000_000), format="jpeg", expected_tokens=256)]))
    assert [len(part) for part in split([photograph] * 5, *JSON_LIMITS)] == [2, 2, 1]


def test_a_chunk_closes_at_the_number_of_datums() -> None:
    assert [
        len(part) for part in split([datum()] * 1025, SERVER.fwdbwd_max_chunk_len, SERVER.fwdbwd_max_chunk_bytes_count)
    ] == [1024, 1]
    assert [len(part) for part in split([datum()] * 257, *JSON_LIMITS)] == [128, 128, 1]


def test_a_chunk_closes_before_its_bytes_exceed_the_limit() -> None:
    size = estimate(datum(100))
    assert [len(part) for part in split([datum(100)] * 5, 1024, 2 * size)] == [2, 2, 1]
    assert [len(part) for part in split([datum(100)] * 5, 1024, 2 * size - 1)] == [1, 1, 1, 1, 1]


def test_the_official_limits_of_each_dialect_are_the_defaults() -> None:
    assert (SERVER.fwdbwd_max_chunk_len, SERVER.fwdbwd_max_chunk_bytes_count) == (1024, 5_000_000)
    assert JSON_LIMITS[:2] == (128, 500_000)


def test_a_datum_larger_than_any_request_goes_alone() -> None:
    parts = split([datum(1), datum(1000), datum(1)], 10, 100)
    assert [[d.model_input.length for d in part] for part in parts] == [[1], [1000], [1]]


@pytest.mark.parametrize("limit", [0, -1])
def test_senseless_limits_of_a_service_still_send_everything(limit: int) -> None:
    assert [len(part) for part in split([datum()] * 3, limit, limit)] == [1, 1, 1]


def test_no_data_is_no_chunk() -> None:
    assert split([], 1024, 5_000_000) == []


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 6), st.integers(1, 1500))
def test_every_datum_is_sent_once_in_order_and_within_the_limits(
    lengths: list[int], max_items: int, max_bytes: int
) -> None:
    data = [datum(length) for length in lengths]
    parts = split(data, max_items, max_bytes)
    assert [entry for part in parts for entry in part] == data
    for number, part in enumerate(parts, 1):
        assert 1 <= len(part) <= max_items
        size = sum(map(estimate, part))
        assert size <= max_bytes or len(part) == 1
        if number < len(parts) and len(part) < max_items:
            assert size + estimate(parts[number][0]) > max_bytes, "no chunk closes early"


def test_the_answers_of_chunks_read_as_one() -> None:
    def answer(kind: str, *values: float) -> ForwardBackwardOutput:
        outputs = [{"logprobs": TensorData([value])} for value in values]
        metrics = {"loss:sum": sum(values), "loss:mean": sum(values) / len(values)}
        return ForwardBackwardOutput(loss_fn_output_type=kind, loss_fn_outputs=outputs, metrics=metrics)

    joined = join([answer("TorchLossReturn", 1.0, 2.0), answer("other", 6.0)])
    assert [output["logprobs"].data for output in joined.loss_fn_outputs] == [[1.0], [2.0], [6.0]]
    assert joined.loss_fn_output_type == "TorchLossReturn"
    assert joined.metrics == pytest.approx({"loss:sum": 9.0, "loss:mean": 3.0})
    assert joined.loss == 9.0


def test_a_hash_passes_through_the_joined_answer_without_losing_bits() -> None:
    def answer(value: int) -> ForwardBackwardOutput:
        return ForwardBackwardOutput(
            loss_fn_output_type="", loss_fn_outputs=[{"logprobs": TensorData([0.0])}], metrics={"h:hash2": value}
        )

    assert join([answer(2**53 - 1), answer(2**53 - 2), answer(2**53 - 4)]).metrics == {"h:hash2": 3 * 2**53 - 7}


def test_joining_nothing_is_an_empty_answer() -> None:
    joined = join([])
    assert (joined.loss_fn_output_type, joined.loss_fn_outputs, joined.metrics) == ("", [], {})
