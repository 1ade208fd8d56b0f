"""Large results as JSON: written in pieces, which together are what is written at once."""

from __future__ import annotations

import json

import pytest

from tinkex.errors import ValidationError
from tinkex.types.packed import pack_floats, pack_tokens
from tinkex.types.sampling import SampledSequence, SampleResponse, pack_prompt_logprobs
from tinkex.types.tensor import TensorData
from tinkex.types.training import ForwardBackwardOutput
from tinkex.wire import json_codec, json_pieces
from tinkex.wire.dialect import Dialect

FLOATS = [float(number) / 8 for number in range(100)]
OUTPUTS = {
    "nothing": ForwardBackwardOutput("scalar", []),
    "without tensors": ForwardBackwardOutput("scalar", [{}, {}], {"loss:sum": 1.5}),
    "flat": ForwardBackwardOutput("rows", [{"logprobs": TensorData(FLOATS), "elementwise_loss": TensorData([1.0])}]),
    "with a shape": ForwardBackwardOutput(
        "rows", [{"logprobs": TensorData(FLOATS, shape=[10, 10])}] * 2, {"a:mean": 0.0}
    ),
    "whole numbers": ForwardBackwardOutput("rows", [{'a "name"': TensorData(list(range(100)))}]),
    "sparse": ForwardBackwardOutput(
        "rows", [{"logprobs": TensorData([1.0, 2.0, 3.0], "float32", [3, 50], [0, 1, 1, 3], [7, 0, 49])}]
    ),
    "empty": ForwardBackwardOutput("rows", [{"logprobs": TensorData([], "float32")}]),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("numbers", [1, 7, 100, 4096])
def test_the_pieces_of_a_pass_are_its_json(name: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_NUMBERS", numbers)
    output = OUTPUTS[name]
    pieces = list(json_pieces.training_pieces(output))
    assert json.loads(b"".join(pieces)) == json_codec.dump(output, Dialect.PROTO)
    if name in ("flat", "with a shape", "whole numbers") and numbers == 1:
        assert max(map(len, pieces)) < 60, "no piece has all numbers"


@pytest.mark.parametrize("numbers", [4, 300, 4096])
def test_small_datums_are_written_together_and_large_ones_alone(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_NUMBERS", numbers)
    sizes = [3, 1, 5, 400, 2, 2, 400, 400, 1, 0]
    datums = [{"logprobs": TensorData(FLOATS * 4, "float32") if size > 100 else TensorData([1.5] * size, "float32")}
              for size in sizes]  # fmt: skip
    output = ForwardBackwardOutput("rows", datums, {"loss:sum": 2.0})
    assert json.loads(b"".join(json_pieces.training_pieces(output))) == json_codec.dump(output, Dialect.PROTO)


def test_a_metric_that_json_does_not_have_is_found_before_anything_is_sent() -> None:
    with pytest.raises(ValidationError, match="is nan"):
        json_pieces.training_pieces(ForwardBackwardOutput("rows", [], {"loss:sum": float("nan")}))


def test_a_sample_with_an_infinity_is_found_before_anything_is_sent() -> None:
    row = SampledSequence.from_buffers("stop", pack_tokens([1] * 9000), pack_floats([-0.5] * 8999 + [float("-inf")]))
    with pytest.raises(ValidationError, match=r"sequences\[0\].logprobs\[8999\] is -inf"):
        json_pieces.sample_pieces(SampleResponse.from_buffers([row]))


def test_no_piece_of_a_long_sample_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: the log-probabilities of a prompt of 131,072 tokens were one piece, which took 62 ms."""
    monkeypatch.setattr(json_pieces, "PIECE_NUMBERS", 100)
    row = SampledSequence.from_buffers("stop", pack_tokens([1] * 5000), pack_floats([-0.5] * 5000), "id")
    response = SampleResponse.from_buffers([row], pack_prompt_logprobs([None, *[-0.25] * 5000]))
    pieces = list(json_pieces.sample_pieces(response))
    assert json.loads(b"".join(pieces)) == json_codec.dump(response, Dialect.PROTO)
    assert max(map(len, pieces)) < 1000


def test_a_number_that_json_does_not_have_is_named_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_NUMBERS", 8)
    output = ForwardBackwardOutput("rows", [{"logprobs": TensorData([*FLOATS, float("inf")])}])
    with pytest.raises(ValidationError, match=r"loss_fn_outputs\[0\].logprobs.data\[100\] is inf"):
        json_pieces.training_pieces(output)


def test_blocks_have_the_bytes_of_the_pieces() -> None:
    pieces = [bytes([number]) * number for number in range(20)]
    blocks = list(json_pieces.joined(iter(pieces), 30))
    assert b"".join(blocks) == b"".join(pieces)
    assert all(len(block) >= 30 for block in blocks[:-1]) and len(blocks[-1]) > 0
