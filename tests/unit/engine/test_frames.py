"""Frames keep what they are given, byte for byte, and notice when something is missing."""

from __future__ import annotations

import io
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.contract import Sampled, SampleSpec, Sequence, Tokens
from tinkex.engine.frames import Frame, decode
from tinkex.engine.messages import event_frame, pass_frame, read_event, read_sample, sample_frame
from tinkex.engine.process.main import read_frame
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.tensor import TensorData

NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.lists(st.binary(max_size=40), max_size=4))
def test_a_frame_comes_back_as_it_went(head: dict[str, object], buffers: list[bytes]) -> None:
    frame = decode(Frame(head, buffers).encode())
    assert frame.head == head
    assert [bytes(buffer) for buffer in frame.buffers] == buffers


def test_buffers_wider_than_bytes_are_counted_in_bytes() -> None:
    numbers = array("q", [1, -2, 3])
    frame = decode(Frame({}, [memoryview(numbers), b"after"]).encode())
    assert [bytes(buffer) for buffer in frame.buffers] == [numbers.tobytes(), b"after"]


def test_the_heads_of_a_frame_are_not_changed_by_encoding_it() -> None:
    head = {"op": "drop"}
    Frame(head, [b"1"]).encode()
    assert head == {"op": "drop"}


@pytest.mark.parametrize("cut", [0, 5, 12, 20, -1])
def test_a_frame_that_was_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="frame"):
        decode(Frame({"op": "forward"}, [b"12345678"]).encode()[:cut])


def test_a_frame_with_something_behind_it_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1"):
        decode(Frame({}, [b"x" * 900]).encode() + b"more" * 50)


def test_the_child_reads_frame_after_frame_and_then_the_end() -> None:
    frames = [Frame({"n": 1}, [b"a" * 100_000, b""]), Frame({"n": 2}), Frame({"n": 3}, [b"b"])]
    stream = io.BytesIO(b"".join(frame.encode() for frame in frames))
    read = [read_frame(stream) for _ in frames]
    assert [frame and frame.head for frame in read] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert read[0] is not None and [len(buffer) for buffer in read[0].buffers] == [100_000, 0]
    assert read_frame(stream) is None


@pytest.mark.parametrize("cut", [3, 14, -1])
def test_a_pipe_that_ends_inside_a_frame_is_the_end(cut: int) -> None:
    assert read_frame(io.BytesIO(Frame({"op": "drop"}, [b"12345678"]).encode()[:cut])) is None


def test_the_childs_buffers_can_be_written_to() -> None:
    frame = read_frame(io.BytesIO(Frame({}, [b"1234"]).encode()))
    assert frame is not None and not memoryview(frame.buffers[0]).readonly  # torch warns of what it may not write


def test_a_pass_carries_tokens_and_tensors_packed() -> None:
    datum = Datum(
        model_input=ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={
            "target_tokens": TensorData(data=[6, 7, 8], dtype="int64", shape=[3]),
            "weights": TensorData(data=[0.0, 1.0, 0.5], dtype="float32", shape=[3]),
        },
    )
    frame = decode(pass_frame("forward", "a", [datum, datum], "cross_entropy", None).encode())
    assert frame.head["op"] == "forward" and frame.head["config"] == {}
    row = frame.head["data"][1]
    assert array("i", bytes(frame.buffers[row["tokens"]])).tolist() == [5, 6, 7]
    weights = row["inputs"]["weights"]
    assert (weights["dtype"], weights["shape"]) == ("float32", [3])
    assert array("f", bytes(frame.buffers[weights["data"]])).tolist() == [0.0, 1.0, 0.5]


def test_a_sample_spec_comes_back_equal() -> None:
    spec = SampleSpec(
        base="tinkex/tiny", weights="folder", prompt=(1, 2, 3), num_samples=2, temperature=0.25, seed=2**63 - 1,
        stop_tokens=(7,), stop_strings=("\n", "ö"), last_n=4, targets=((1,), (2, 3)), is_streamed=True,
    )  # fmt: skip
    assert read_sample(decode(sample_frame(spec).encode())) == spec
    bare = SampleSpec(base="b")
    assert read_sample(decode(sample_frame(bare).encode())) == bare


def test_sample_events_come_back_equal() -> None:
    tokens = Tokens(1, [4, 5], [-0.5, -1.25])
    done = Sampled(
        sequences=[Sequence(tokens=[4], logprobs=[-0.1], stop_reason="stop", topk=[[(4, -0.1), (5, -3.0)]])],
        prompt_logprobs=[None, -2.0],
        topk_prompt=[None, [(1, -0.5)]],
        targets=[[-1.0, -2.0]],
        alternatives=[[(3, -0.75)]],
        cache_hit_tokens=2,
        prompt_tokens=2,
    )
    bare = Sampled(sequences=[Sequence(tokens=[], logprobs=[], stop_reason="length")])
    for event in (tokens, done, bare):
        assert read_event(decode(event_frame(event).encode())) == event
