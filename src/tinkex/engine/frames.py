"""Frames, the bytes of commands and replies; packets, the frames on the engine's pipe. Never pickle.

A frame is a JSON head, then raw buffers. Numbers keep their packed form: what came in a protobuf body goes to the
engine as it is. All numbers here are little-endian.

    4 bytes  length of the head
    8 bytes  length of all buffers together
    head     {"op": …, …, "_sizes": [bytes of each buffer]}
    buffers  end to end

A packet is a frame behind a header with what the pipe alone needs to know. The journal stores frames, and the bytes it
stored are what the engine reads: without the header they would be decoded and encoded again to add two fields.

    8 bytes  number of the request; its replies have the same number, and 0 is for packets without a request
    4 bytes  length of the tenant's name
    tenant   UTF-8; empty in replies and where it makes no difference
    frame    as above
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson

from tinkex.types.packed import Buffer

PREFIX = struct.Struct("<IQ")
HEADER = struct.Struct("<QI")
_SIZES = "_sizes"


@dataclass(frozen=True, slots=True)
class Frame:
    """A command or a reply. `head` is plain JSON (NaN and infinity become null) and names buffers by their index."""

    head: dict[str, Any]
    buffers: Sequence[Buffer] = field(default=())

    def encode(self) -> bytes:
        return b"".join(self.parts())

    def parts(self) -> list[Buffer]:
        """Return the same bytes in pieces, for a writer that takes many buffers."""
        sizes = [memoryview(buffer).nbytes for buffer in self.buffers]
        head = orjson.dumps({**self.head, _SIZES: sizes})
        return [PREFIX.pack(len(head), sum(sizes)), head, *self.buffers]


def packet_parts(number: int, tenant: str, frame: Frame | bytes) -> list[Buffer]:
    """Return a packet's bytes in pieces, for a writer that takes many. An encoded frame is one of them, as it is.

    Raises ValueError if an encoded frame has the wrong length: the reader would take the next packets for the rest of
    it, and nothing that is sent after it would ever be read.
    """
    name = tenant.encode()
    if not isinstance(frame, Frame):
        check_length(frame)
    return [HEADER.pack(number, len(name)), name, *(frame.parts() if isinstance(frame, Frame) else (frame,))]


def check_length(content: Buffer) -> None:
    """Raise ValueError unless `content` is as long as its prefix says."""
    view = memoryview(content)
    if view.nbytes < PREFIX.size:
        raise ValueError(f"A frame of {view.nbytes} bytes is shorter than its prefix.")
    size = PREFIX.size + sum(PREFIX.unpack_from(view))
    if view.nbytes != size:
        raise ValueError(f"A frame that should have {size} bytes has {view.nbytes}.")


def decode(content: Buffer) -> Frame:
    """Decode a whole frame; its buffers are views into `content`. Raises ValueError if it is damaged."""
    view = memoryview(content)
    check_length(view)
    start = PREFIX.size + PREFIX.unpack_from(view)[0]
    return decode_parts(view[PREFIX.size : start], view[start:])


def decode_parts(head: Buffer, body: Buffer) -> Frame:
    """Decode a frame whose prefix was read already. Raises ValueError if it is damaged."""
    fields = orjson.loads(memoryview(head))
    sizes = fields.pop(_SIZES, None) if isinstance(fields, dict) else None
    if not isinstance(sizes, list) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("The head of a frame does not say how long its buffers are.")
    view, at, buffers = memoryview(body), 0, []
    for size in sizes:
        buffers.append(view[at : at + size])
        at += size
    if at != view.nbytes:
        raise ValueError(f"The buffers of a frame have {view.nbytes} bytes, its head says {at}.")
    return Frame(fields, buffers)


def read_frame(stream: BinaryIO) -> Frame | None:
    """Read the next frame, or None at the end. Its buffers are writable views: torch warns about read-only ones."""
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    head_size, body_size = PREFIX.unpack(prefix)
    head, body = stream.read(head_size), memoryview(bytearray(body_size))
    at = 0
    while at < body_size:
        count = stream.readinto(body[at:])  # type: ignore[attr-defined]
        if not count:
            return None
        at += count
    return decode_parts(head, body) if len(head) == head_size else None
