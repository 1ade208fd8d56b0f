"""What the engine reads, on any bytes: frames, and the JSON and tensors of a checkpoint. A value or a known error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from tests.unit.damage import damaged
from tinkex.engine import frames
from tinkex.engine.adapters import checkpoint
from tinkex.engine.contract import EngineFault
from tinkex.engine.frames import PREFIX, Frame

FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
HEADS = st.dictionaries(st.text(max_size=4), st.integers(0, 9) | st.text(max_size=4), max_size=3)
FRAMES = st.builds(lambda head, buffers: Frame(head, buffers).encode(), HEADS, st.lists(st.binary(max_size=20)))


@FEW
@given(st.binary(max_size=60) | damaged(FRAMES))
def test_any_bytes_are_a_frame_or_a_value_error(content: bytes) -> None:
    try:
        frame = frames.decode(content)
    except ValueError:
        return
    assert sum(len(buffer) for buffer in frame.buffers) <= len(content)


@pytest.mark.parametrize(
    "head",
    [[], 1, {}, {"_sizes": 1}, {"_sizes": None}, {"_sizes": ["4"]}, {"_sizes": [8, -4]}, {"_sizes": [4.0]}],
    ids=str,
)
def test_a_frame_whose_head_says_nothing_of_its_buffers_is_rejected(head: Any) -> None:
    text = json.dumps(head).encode()
    with pytest.raises(ValueError, match="how long its buffers are"):
        frames.decode(PREFIX.pack(len(text), 4) + text + b"1234")


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor(3)}
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "I64", "F8_E4M3", "BOOL", "F4", "nonsense"]) | st.integers(),
        "shape": st.lists(st.integers(-1, 4) | st.sampled_from([1 << 31, 1 << 62, 1 << 64]), max_size=4) | st.text(),
        "data_offsets": st.lists(st.integers(-1, 40) | st.just(1 << 63), max_size=3),
        "more": st.integers(),
    },
)
HEADERS = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), ENTRIES | st.integers() | st.text())


@FEW
@given(
    damaged(st.just(save(TENSORS))) | st.builds(safetensors, HEADERS, st.binary(max_size=40)) | st.binary(max_size=40)
)
def test_any_file_of_tensors_is_read_or_called_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / checkpoint.WEIGHTS
    path.write_bytes(content)
    try:
        tensors = checkpoint._read_tensors(path)
    except EngineFault as fault:
        assert checkpoint.WEIGHTS in str(fault)
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) <= len(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little"),
        safetensors(b"[" * 100_000),
        safetensors(b'{"a":' * 50_000),
        safetensors({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}}),
        safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(8)),
    ],
    ids=["empty", "endless header", "1 TiB header", "deep list", "deep object", "4 TiB tensor", "backwards"],
)
def test_a_header_that_lies_is_called_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(EngineFault, match="damaged"):
        checkpoint._read_tensors(tmp_path / "x.safetensors")


def test_tensors_read_back_as_they_were_saved(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(save(TENSORS))
    tensors = checkpoint._read_tensors(tmp_path / "x.safetensors")
    assert tensors.keys() == TENSORS.keys() and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


CONFIGS = st.dictionaries(st.text(max_size=5), st.integers() | st.text()).map(lambda value: json.dumps(value).encode())


@FEW
@given(damaged(CONFIGS) | st.binary(max_size=30) | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{"]))
def test_any_file_of_settings_is_read_or_rejected_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / checkpoint.CONFIG
    path.write_bytes(content)
    try:
        checkpoint._read_json(path)
    except EngineFault as fault:
        assert checkpoint.CONFIG in str(fault)
