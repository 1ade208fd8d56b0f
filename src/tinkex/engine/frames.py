"""The bytes between server and engine, and in the journal: a JSON head, then raw buffers. Never pickle.

    4 bytes  length of the head (little-endian)
    8 bytes  length of all buffers together
    head     {"op": …, …, "_sizes": [bytes of each buffer]}
    buffers  end to end

Numbers keep their packed form: what came in a protobuf body goes to the engine as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tinkex.types.packed import Buffer

PREFIX = struct.Struct("<IQ")
_SIZES = "_sizes"


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `head` is plain JSON (NaN and infinity become null); buffers are referred to by their index."""

    head: dict[str, Any]
    buffers: Sequence[Buffer] = field(default=())

    def encode(self) -> bytes:
        return b"".join(self.parts())

    def parts(self) -> list[Buffer]:
        """The same bytes unjoined, for a writer that takes many buffers."""
        sizes = [memoryview(buffer).nbytes for buffer in self.buffers]
        head = orjson.dumps({**self.head, _SIZES: sizes})
        return [PREFIX.pack(len(head), sum(sizes)), head, *self.buffers]


def decode(content: Buffer) -> Frame:
    """Read a whole frame; its buffers are views into `content`. A frame that was cut short is a ValueError."""
    view = memoryview(content)
    if view.nbytes < PREFIX.size:
        raise ValueError(f"A frame of {view.nbytes} bytes is shorter than its prefix.")
    head_size, body_size = PREFIX.unpack_from(view)
    start = PREFIX.size + head_size
    if view.nbytes != start + body_size:
        raise ValueError(f"A frame of {start + body_size} bytes has {view.nbytes}.")
    return decode_parts(view[PREFIX.size : start], view[start:])


def decode_parts(head: Buffer, body: Buffer) -> Frame:
    """Read a frame whose prefix was read already."""
    fields = orjson.loads(memoryview(head))
    view, at, buffers = memoryview(body), 0, []
    for size in fields.pop(_SIZES):
        buffers.append(view[at : at + size])
        at += size
    if at != view.nbytes:
        raise ValueError(f"The buffers of a frame have {view.nbytes} bytes, its head says {at}.")
    return Frame(fields, buffers)
