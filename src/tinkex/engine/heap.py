"""Returns freed memory to the system. The engine keeps it otherwise (`process.main`): passes need the same again."""

from __future__ import annotations

import sys


def trim() -> None:
    """Return what was freed, so that code which does not use this process's heap finds memory too."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)
