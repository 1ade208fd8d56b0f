"""Frames and packets keep their content byte for byte, and truncated ones are rejected."""

from __future__ import annotations

import io
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.contract import (
    Sampled,
    SampleSpec,
    SequenceOutput,
    Tokens,
    event_frame,
    pass_frame,
    read_event,
    read_sample,
    sample_frame,
)
from tinkex.engine.frames import Frame, decode, packet_parts
from tinkex.engine.process.main import read_packet
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.packed import pack_floats
from tinkex.types.sampling import TopkLogprobs
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
def test_a_truncated_frame_is_rejected(cut: int) -> None:
    with pytest.raises(ValueError, match="frame"):
        decode(Frame({"op": "forward"}, [b"12345678"]).encode()[:cut])


def test_a_frame_with_trailing_bytes_is_rejected() -> None:
    with pytest.raises(ValueError, match="has 1"):
        decode(Frame({}, [b"x" * 900]).encode() + b"more" * 50)


def packet(number: int, tenant: str, frame: Frame | bytes) -> bytes:
    return b"".join(packet_parts(number, tenant, frame))


@pytest.mark.parametrize("head", [b"{}", b"[]", b"7", b'{"_sizes":7}', b'{"_sizes":["2"]}', b'{"_sizes":[-1,3]}'])
def test_a_head_that_does_not_describe_the_buffers_is_a_value_error(head: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        decode(struct.pack("<IQ", len(head), 2) + head + b"ab")


def test_the_engine_reads_packet_after_packet_and_then_the_end() -> None:
    frames = [Frame({"op": "a"}, [b"a" * 100_000, b""]), Frame({"op": "b"}), Frame({"op": "c"}, [b"b"])]
    tenants = ["ann", "", "Zoë/🐈"]
    sent = [packet(number, tenant, frame) for number, (tenant, frame) in enumerate(zip(tenants, frames, strict=True))]
    stream = io.BytesIO(b"".join(sent))
    read = [read_packet(stream) for _ in frames]
    assert [found and (found[0], found[1].head) for found in read] == [
        (0, {"op": "a", "tenant": "ann"}), (1, {"op": "b", "tenant": ""}), (2, {"op": "c", "tenant": "Zoë/🐈"}),
    ]  # fmt: skip
    assert read[0] is not None and [len(buffer) for buffer in read[0][1].buffers] == [100_000, 0]
    assert read_packet(stream) is None


def test_an_encoded_frame_is_put_into_its_packet_untouched() -> None:
    """Head and buffers as they were stored, also where this release would have written the head otherwise."""
    head = b'{ "op": "later", "_sizes": [ 2 ] , "field of another release": 1e2}'
    stored = struct.pack("<IQ", len(head), 2) + head + b"xy"
    *_, frame = packet_parts(7, "ann", stored)
    assert frame is stored
    read = read_packet(io.BytesIO(packet(7, "ann", stored)))
    assert read is not None and read[1].head == {"op": "later", "field of another release": 100.0, "tenant": "ann"}


@pytest.mark.parametrize("damaged", [b"", b"\x00", Frame({"op": "x"}, [b"abc"]).encode()[:-1]])
def test_a_damaged_frame_never_reaches_the_pipe(damaged: bytes) -> None:
    """The engine would take the packets behind it for the rest of it: all tenants would wait for ever."""
    with pytest.raises(ValueError, match="A frame"):
        packet_parts(1, "t", damaged)


@pytest.mark.parametrize("cut", [3, 10, 14, 17, 28, -1])
def test_a_pipe_that_ends_inside_a_packet_is_the_end(cut: int) -> None:
    assert read_packet(io.BytesIO(packet(1, "ann", Frame({"op": "drop"}, [b"12345678"]))[:cut])) is None


def test_the_engines_buffers_can_be_written_to() -> None:
    read = read_packet(io.BytesIO(packet(1, "", Frame({}, [b"1234"]))))
    assert read is not None and not memoryview(read[1].buffers[0]).readonly  # torch warns of what it may not write


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
    ranked = TopkLogprobs.from_lists([[(4, -0.1), (5, -3.0)]])
    done = Sampled(
        sequences=[SequenceOutput(tokens=[4], logprobs=[-0.1], stop_reason="stop", topk=ranked)],
        prompt_logprobs=[None, -2.0],
        topk_prompt=TopkLogprobs.from_lists([None, [(1, -0.5)]]),
        targets=pack_floats([-1.0, -2.0]),
        alternatives=TopkLogprobs.from_lists([[(3, -0.75)]]),
        cache_hit_tokens=2,
        prompt_tokens=2,
    )
    bare = Sampled(sequences=[SequenceOutput(tokens=[], logprobs=[], stop_reason="length")])
    for event in (tokens, done, bare):
        assert read_event(decode(event_frame(event).encode())) == event
