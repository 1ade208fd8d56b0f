"""Reads how much memory this machine lets its processes use, and returns large freed blocks to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNKNOWN_BYTES = 8 << 30
"""What is assumed where the system does not say."""


_M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Return a block of a megabyte or more to the system as soon as it is freed.

    glibc raises this threshold, up to 32 MiB, with the first large block that is freed. After that each thread keeps up
    to 64 MiB of what bodies and results needed once, and `malloc_trim` does not reach it: a server that had read bombs
    had 268 MB, now 78.
    """
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # not with musl
            libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def memory_bytes() -> int:
    """Return the memory that the service may use: the machine's, a container's, or the limit of the process."""
    amounts = [*_physical(), *_container(), *_process()]
    return min(amounts, default=_UNKNOWN_BYTES)


def adapter_budget(adapter_memory_mb: int | None) -> int:
    """Return the bytes that adapters may take in the engine: what is set, or a quarter of the machine's memory."""
    return memory_bytes() // 4 if adapter_memory_mb is None else adapter_memory_mb * 10**6


def _physical() -> list[int]:
    try:
        return [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):  # Windows
        return []


def _container() -> list[int]:
    amounts = []
    for file in _CONTAINER_LIMITS:
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        amounts += [int(text)] if text.isdigit() else []  # "max" is no limit
    return amounts


def _process() -> list[int]:
    try:
        import resource
    except ImportError:  # Windows
        return []
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return [] if limit == resource.RLIM_INFINITY else [limit]
