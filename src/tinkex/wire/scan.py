"""Looks at a body before it is decoded: how many elements it has, and where its datums begin and end.

Decoding turns every element into objects: two bytes of an empty list become 64 in memory, two bytes of an empty
protobuf datum 350. So elements are counted first, at the speed of a search for bytes. Large JSON bodies are cut into
datums that are parsed one by one, because orjson holds the interpreter for as long as one call takes: 60 ms for 8 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from tinkex.errors import ValidationError

_PIECE: Final = 16 << 20
"""Bytes searched at once: 4 ms, during which no other thread runs."""
_LENGTH_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_STRUCTURE: Final = (b'"', b"[", b"]", b"{", b"}")


def count_json_containers(content: bytes) -> int:
    """Return an upper bound for the lists and objects in a JSON text. Brackets inside strings count too."""
    view = range(0, len(content), _PIECE)
    return sum(content.count(bracket, start, start + _PIECE) for start in view for bracket in (b"[", b"{"))


class DatumPieces(NamedTuple):
    """A JSON body in pieces: everything but its datums, and the text of each datum."""

    envelope: bytes
    datums: list[bytes]


def split_json_datums(content: bytes, parent: bytes) -> DatumPieces | None:
    """Cut the objects out of the list `data` of the object `parent`, as in {"forward_input": {"data": [{…}, {…}]}}.

    The envelope has an empty list in its place. None if there is no such list, or the text is not JSON: the parser of
    the whole then says what is wrong.
    """
    scanner = _Scanner(content)
    key, key_end = b"", 0
    path: list[bytes] = []
    while (token := scanner.next()) is not None:
        at, mark = token
        if mark == b'"':
            end = scanner.skip_string(at)
            if end is None:
                return None
            key, key_end = content[at + 1 : end], end + 1
        elif mark in b"]}":
            if not path:
                return None
            path.pop()
        else:
            path.append(key if content[key_end:at].strip() == b":" else b"")
            if mark == b"[" and path[1:] == [parent, b"data"]:
                bounds = _elements(scanner, at)
                if bounds is None:
                    return None
                envelope = content[: at + 1] + content[bounds[-1][1] if bounds else at + 1 :]
                return DatumPieces(envelope, [content[start:end] for start, end in bounds])
    return None


def _elements(scanner: _Scanner, opening: int) -> list[tuple[int, int]] | None:
    """Return where each object of the list begins and ends. None if it holds anything but objects."""
    bounds: list[tuple[int, int]] = []
    depth, start = 0, 0
    text, between = scanner.content, opening + 1
    while (token := scanner.next()) is not None:
        at, mark = token
        if mark == b'"':
            if depth == 0 or scanner.skip_string(at) is None:
                return None
        elif mark == b"]" and depth == 0:
            return bounds if not text[between:at].strip() else None
        elif mark in b"[{":
            if depth == 0:
                if mark == b"[" or text[between:at].strip() != (b"," if bounds else b""):
                    return None
                start = at
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                bounds.append((start, at + 1))
                between = at + 1
    return None


class _Scanner:
    """Finds the next quote or bracket. Long runs of numbers are passed at the speed of a search for one byte."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._at = 0
        self._next = {mark: content.find(mark) for mark in _STRUCTURE}

    def next(self) -> tuple[int, bytes] | None:
        """Return the position of the next mark, and the mark."""
        nearest, nearest_mark = -1, b""
        for mark, position in self._next.items():
            if 0 <= position < self._at:
                position = self._next[mark] = self.content.find(mark, self._at)
            if position >= 0 and (nearest < 0 or position < nearest):
                nearest, nearest_mark = position, mark
        if nearest < 0:
            return None
        self._at = nearest + 1
        return nearest, nearest_mark

    def skip_string(self, opening: int) -> int | None:
        """Move behind a string. Returns the position of its closing quote."""
        end = opening
        while (end := self.content.find(b'"', end + 1)) >= 0:
            before = end - 1
            while self.content[before] == 0x5C:  # a backslash; an even number of them escapes only themselves
                before -= 1
            if (end - before) % 2:
                self._at = end + 1
                return end
        return None


def check_message_fields(content: bytes, field: int, max_messages: int, max_fields: int, what: str) -> None:
    """Reject a protobuf message with more than `max_messages` entries of a repeated field, or more than `max_fields`
    fields in all of those entries together.

    Nothing else is looked at: a damaged body is the decoder's to report. The work is proportional to the limits.
    """
    messages = fields = 0
    for number, start, end in _fields(content, 0, len(content)):
        if number != field:
            continue
        messages += 1
        if messages > max_messages:
            raise ValidationError(f"The body has more than {max_messages:,} {what}. Send fewer per call.", "too_many")
        for _ in _fields(content, start, end):
            fields += 1
            if fields > max_fields:
                raise ValidationError(
                    f"The {what} of the body have more than {max_fields:,} fields. Send fewer per call.", "too_many"
                )


def _fields(content: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of each field with a length. Ends silently where the bytes make no sense."""
    while at < end:
        tag, at = _varint(content, at, end)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            size, at = _varint(content, at, end)
            if at + size > end:
                return
            yield tag >> 3, at, at + size
            at += size
        elif kind == 0:
            _, at = _varint(content, at, end)
            yield tag >> 3, at, at
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
            yield tag >> 3, at, at
        else:
            return


def _varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a variable-length number and the position behind it; at the end of the bytes, 0 and the end."""
    value = shift = 0
    while at < end and shift < 64:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end
