"""Writes protobuf from parts, so that large buffers are copied once: into the finished message.

A message is a list of bytes-like parts. The protobuf runtime copies every tensor once more, and takes no memoryview.
Reading is left to the runtime: there, the input cannot be trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from tinkex.errors import ValidationError

Part = bytes | memoryview
Parts = list[Part]


def fields_of(kind: Any) -> Any:
    """Return the numbers of a message's fields by name, as `tinkex.proto` has them: an unknown name raises."""
    return SimpleNamespace(**{field.name: field.number for field in kind.DESCRIPTOR.fields})


def varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; a negative number as its 64-bit complement, like protobuf's int32 and int64."""
    if 0 <= value < 0x80:
        return _SMALL[value]
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_SMALL = [bytes((value,)) for value in range(0x80)]


def integer(field: int, value: int, *, keep_default: bool = False) -> bytes:
    """An integer, enum or bool. Zero is left out, as proto3 does, unless the field knows whether it was set."""
    return _SMALL[field << 3] + varint(value) if value or keep_default else b""


def text(field: int, value: str, *, keep_default: bool = False) -> bytes:
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise ValidationError(f"{value[:60]!r} cannot be sent: half a character (a lone surrogate) is in it") from None
    return _SMALL[field << 3 | 2] + varint(len(raw)) + raw if raw or keep_default else b""


def double(field: int, value: float) -> bytes:
    """Always written: doubles occur in maps and alternatives only, where zero counts."""
    return _SMALL[field << 3 | 1] + struct.pack("<d", value)


def packed(field: int, values: Iterable[int]) -> bytes:
    """A repeated integer."""
    raw = b"".join(map(varint, values))
    return _SMALL[field << 3 | 2] + varint(len(raw)) + raw if raw else b""


def blob(field: int, content: Part, *, keep_default: bool = False) -> Parts:
    """A bytes field; the content is passed on, not copied."""
    return [_SMALL[field << 3 | 2] + varint(len(content)), content] if len(content) or keep_default else []


def entry(field: int, key: str, value: Parts) -> Parts:
    """One entry of a map. In every map the key is field 1 and the value `MAP_VALUE`."""
    return message(field, [text(1, key, keep_default=True), *value])


MAP_VALUE = 2


def message(field: int, parts: Parts) -> Parts:
    """A message inside another one; an empty one is written too."""
    return [_SMALL[field << 3 | 2] + varint(sum(map(len, parts))), *parts]
