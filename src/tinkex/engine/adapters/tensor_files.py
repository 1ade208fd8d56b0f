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

BLOCK_BYTES = 1 << 20
"""Takes about a millisecond to hash and write: so long another thread may have to wait for a core."""
PART_BYTES = 8 << 20
"""So much goes to the disk at a time, and two parts at once at most. Otherwise a whole file would go at its end, and
other writers wait: of the appends to a journal beside 545 MB the slowest took 92 to 192 ms, with it 38 to 44."""
_DTYPES = {torch.float32: "F32", torch.int64: "I64"}
_BEGIN, _FINISH = 2, 1 | 2 | 4
"""Flags of sync_file_range: hand pages to the disk; the same, and wait for them."""


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
    pace: Callable[[], None] = no_pause,
    is_hashed: bool = True,
) -> FileSum:
    """Write a new safetensors file. Tensors must be contiguous, and must not change meanwhile.

    `pace` is called after every block, and may wait. Without `is_hashed` the checksum is empty.
    """
    # The order of safetensors: large types first, for alignment, and then by name.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    digest = hashlib.sha256() if is_hashed else None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        size = begun = former = 0
        """Bytes written, handed to the disk, and handed to it before the last part."""
        for block in _blocks(ordered, metadata):
            if digest is not None:
                digest.update(block)
            _write_all(descriptor, block)
            size += block.nbytes
            if size - begun >= PART_BYTES:
                _sync_range(descriptor, begun, size, _BEGIN)
                if begun:
                    _sync_range(descriptor, former, begun, _FINISH)
                former, begun = begun, size
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
            yield flat[start : start + count].cpu().numpy().data.cast("B")


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


def _sync_range(descriptor: int, start: int, end: int, flags: int) -> None:
    """Write a part of a file to the disk, where the system can do that. Nothing is safe before `fsync`."""
    sync_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if sync_range is not None:
        sync_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(end - start), flags)
