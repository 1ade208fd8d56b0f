"""Decodes responses: small ones at once, large ones in a worker thread, so that the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from tinkex.types.base import Value
from tinkex.wire import envelope, json_codec
from tinkex.wire.envelope import Accepted

INLINE_BYTES = 1 << 18
"""Up to this size a response is decoded on the loop: a few milliseconds, where a thread costs 0.1."""
T = TypeVar("T")
V = TypeVar("V", bound=Value)


async def read_value(kind: type[V], content: bytes) -> V:
    """Return the value of a JSON response. Raises APIResponseValidationError if it does not fit."""
    return await decoded(functools.partial(json_codec.read_content, kind, content), len(content))


async def read_accepted(content: bytes) -> Accepted:
    """Return the response to a submission. Raises APIResponseValidationError."""
    return await decoded(functools.partial(envelope.read_accepted, content), len(content))


async def read_object(content: bytes) -> dict[str, Any]:
    """Return a JSON response that must be an object. Raises APIResponseValidationError."""
    return await decoded(functools.partial(json_codec.read_object, content), len(content))


async def decoded(decode: Callable[[], T], size_bytes: int) -> T:
    """Return what `decode()` returns for so many bytes."""
    if size_bytes <= INLINE_BYTES:
        return decode()
    return await asyncio.get_running_loop().run_in_executor(None, decode)
