"""Writes tensors to a safetensors file in small blocks, straight from their memory, and hashes each block on its way.

`save_file` of safetensors gives the same bytes, in one call that can neither pause nor hash. Here the caller may pause
after every block, the disk begins with a block while the next one is written, and no checksum reads the file again.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

Pace = Callable[[], None]
"""Called after every block; may wait."""

BLOCK_BYTES = 1 << 20
"""Takes about a millisecond to hash and write: so long another thread may have to wait for a core."""
WRITEBACK_BYTES = 16 << 20
"""The disk gets so much at a time. Left to the end, 364 MB would go at once, and every other fsync would wait."""
_DTYPES = {torch.float32: "F32", torch.int64: "I64"}
_SYNC_FILE_RANGE_WRITE = 2


class FileSum(TypedDict):
    """Size and checksum of a file."""

    size_bytes: int
    sha256: str


def no_pause() -> None:
    """The pace of a caller who is in a hurry."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    pace: Pace = no_pause,
    is_hashed: bool = True,
) -> FileSum:
    """Write a new safetensors file. Tensors must be contiguous, and must not change meanwhile.

    Without `is_hashed` the checksum is empty.
    """
    # The order of safetensors: large types first, for alignment, and then by name.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    digest = hashlib.sha256() if is_hashed else None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        size = handed_over = 0
        for block in _blocks(ordered, metadata):
            if digest is not None:
                digest.update(block)
            _write_all(descriptor, block)
            size += block.nbytes
            if size - handed_over >= WRITEBACK_BYTES:
                _start_writeback(descriptor, handed_over, size - handed_over)
                handed_over = size
            pace()
    finally:
        os.close(descriptor)
    return {"size_bytes": size, "sha256": "" if digest is None else digest.hexdigest()}


def sum_of(path: Path) -> FileSum:
    """Return size and checksum of a small file."""
    content = path.read_bytes()
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _blocks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
    yield memoryview(_header(tensors, metadata))
    for tensor in tensors.values():
        assert tensor.is_contiguous()
        flat, count = tensor.detach().view(-1), BLOCK_BYTES // tensor.element_size()
        for start in range(0, flat.numel(), count):
            # Of memory that is the processor's already, this is no copy.
            yield memoryview(flat[start : start + count].cpu().numpy()).cast("B")


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, block: memoryview) -> None:
    while block.nbytes:
        block = block[os.write(descriptor, block) :]


def _start_writeback(descriptor: int, start: int, size: int) -> None:
    """Have the disk begin with a part of a file, if the system can do that. It makes nothing safe: `fsync` does."""
    if sys.platform == "linux":
        function = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if function is not None:
            function(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)
