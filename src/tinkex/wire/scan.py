"""Looks at a body before it is decoded: how many elements it has, and where its datums begin and end.

Decoding turns every element into objects: two bytes of an empty list become 64 in memory, two bytes of an empty
protobuf datum 350. So elements are counted first, at the speed of a search for bytes. Large JSON bodies are cut into
datums that are parsed one by one, because orjson holds the interpreter for as long as one call takes: 60 ms for 8 MB.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from tinkex.errors import ValidationError

_PIECE: Final = 16 << 20
"""Bytes searched at once: 4 ms, during which no other thread runs."""
_LENGTH_DELIMITED: Final = 2
_MOST_ENVELOPE_FIELDS: Final = 64
_FIXED_BYTES: Final = {1: 8, 5: 4}
_GROUP_ENDS: Final = (3, 4)
_STRUCTURE: Final = (b'"', b"[", b"]", b"{", b"}")


def count_json_containers(content: bytes) -> int:
    """Return an upper bound for the lists and objects in a JSON text. Brackets inside strings count too."""
    view = range(0, len(content), _PIECE)
    return sum(content.count(bracket, start, start + _PIECE) for start in view for bracket in (b"[", b"{"))


def count_json_elements(content: bytes) -> int:
    """Return about how many objects a JSON text becomes. A list counts as two of them and an object as six."""
    weights = {b",": 1, b"[": 2, b"{": 6}
    view = range(0, len(content), _PIECE)
    return sum(
        weight * content.count(mark, start, start + _PIECE) for start in view for mark, weight in weights.items()
    )


def is_json_deeper_than(content: bytes, levels: int) -> bool:
    """Return whether lists and objects are nested deeper, in bytes that are known to be JSON."""
    if len(content) <= levels:
        return False
    if b"\\" in content:
        content = _ESCAPES.sub(b"", content)  # an escaped quote ends no string
    # The brackets of strings do not count. Without all other bytes first: that is one quick pass.
    brackets = _STRINGS.sub(b"", content.translate(_TO_SQUARE, _NO_STRUCTURE))
    depth = 0
    for piece in brackets.split(b"[")[1:]:
        depth += 1
        if depth > levels:
            return True
        depth -= len(piece)
    return False


_ESCAPES: Final = re.compile(rb"\\.")
_STRINGS: Final = re.compile(rb'"[^"]*"')
_TO_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b'[]{}"'))


class DatumPieces(NamedTuple):
    """A JSON body in pieces: everything but its datums, and the text of each datum."""

    envelope: bytes
    datums: list[bytes]
    hole: int
    """Where the datums were in the envelope: between the brackets of an empty list."""


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
            path.append(key if key and content[key_end:at].strip() == b":" else b"")
            key = b""  # or each list behind it would be compared with all text since the key
            if mark == b"[" and path[1:] == [parent, b"data"]:
                bounds = _elements(scanner, at)
                if bounds is None:
                    return None
                envelope = content[: at + 1] + content[bounds[-1][1] if bounds else at + 1 :]
                return DatumPieces(envelope, [content[start:end] for start, end in bounds], at + 1)
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


class NumberList(NamedTuple):
    """Where the text of a list of numbers is, with its brackets, and the key of the list."""

    key: bytes
    start: int
    end: int


def find_json_numbers(content: bytes, keys: Collection[bytes], least_bytes: int) -> list[NumberList]:
    """Return the lists without strings, lists and objects in them that are the value of one of the keys.

    The keys count as they are written. Only lists of at least so many bytes are returned. Text that is not JSON gives
    some result: its parser says what is wrong.
    """
    scanner = _Scanner(content)
    found: list[NumberList] = []
    key, key_end, opening = b"", 0, -1
    while (token := scanner.next()) is not None:
        at, mark = token
        if mark == b"]" and opening >= 0 and at + 1 - opening >= least_bytes:
            found.append(NumberList(key, opening, at + 1))
        opening = -1
        if mark == b'"':
            end = scanner.skip_string(at)
            if end is None:
                return found
            key, key_end = content[at + 1 : end] if end - at <= _LONGEST_KEY else b"", end + 1
        elif mark == b"[" and key in keys and content[key_end:at].strip() == b":":
            opening = at
        elif mark != b"]":
            key = b""
    return found


_LONGEST_KEY: Final = 100


def cut_json_numbers(content: bytes, start: int, end: int, piece_bytes: int) -> Iterator[bytes]:
    """Yield the text of a list of numbers as shorter lists. An empty one stands for a comma with nothing behind it."""
    at, last = start + 1, end - 1
    while True:
        comma = content.find(b",", at + piece_bytes, last) if at + piece_bytes < last else -1
        if comma < 0:
            yield b"[" + content[at:last] + b"]"
            return
        yield b"[" + content[at:comma] + b"]"
        at = comma + 1


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


def check_message_fields(
    content: bytes,
    field: int,
    max_messages: int,
    max_fields: int,
    what: str,
    descriptor: Any = None,
    max_elements: int = 0,
) -> None:
    """Reject a protobuf message with more than `max_messages` entries of a repeated field, or more than `max_fields`
    fields in all of those entries, or beside them.

    With the `descriptor` of the entries, reject also what may be more than `max_elements` inside of those fields.
    Nothing else is looked at: a damaged body is the decoder's to report. The work is proportional to the limits.
    """
    messages = fields = others = elements = 0
    # An element takes a byte at least. Most bodies are smaller, and are not looked into.
    growing = _growing_of(descriptor) if descriptor is not None and len(content) > max_elements else None
    too_many_fields = f"The {what} of the body have more than {max_fields:,} fields. Send fewer per call."
    too_many_elements = (
        f"The {what} of the body may have more than {max_elements:,} elements inside, such as the extents of a shape. "
        "Send fewer per call."
    )
    for number, start, end in _fields(content, 0, len(content)):
        if number != field:
            others += 1
            if others > max_fields:
                raise ValidationError(too_many_fields, "too_many")
            continue
        messages += 1
        if messages > max_messages:
            raise ValidationError(f"The body has more than {max_messages:,} {what}. Send fewer per call.", "too_many")
        for inside, at, stop in _fields(content, start, end):
            fields += 1
            if fields > max_fields:
                raise ValidationError(too_many_fields, "too_many")
            if growing and (kind := growing.get(inside)) is not None:
                elements += _most_elements(content, at, stop, kind, max_elements) if kind else stop - at
                if elements > max_elements:
                    raise ValidationError(too_many_elements, "too_many")


def check_message_elements(content: bytes, descriptor: Any, max_elements: int) -> None:
    """Reject a protobuf message that would become more than `max_elements` objects: its fields, those of all messages
    in it, and the numbers in packed lists. Texts and bytes count as one, whatever their length.

    A damaged body is the decoder's to report. The work is proportional to the limit.
    """
    elements = 0
    messages = [(descriptor, 0, len(content))]
    while messages:
        kind, start, end = messages.pop()
        inner = _inner_of(kind)
        for number, at, stop in _fields(content, start, end):
            elements += 1
            inside = inner.get(number)
            if inside is _PACKED:
                elements += stop - at
            elif inside is not None:
                messages.append((inside, at, stop))
            if elements > max_elements:
                raise ValidationError(f"it has more than {max_elements:,} elements", "too_many")


def _most_elements(content: bytes, at: int, end: int, growing: dict[int, Any], enough: int) -> int:
    """Return an upper bound for the elements of a message: its fields, and numbers in packed lists.

    Ends early with more than `enough`. `growing` are the fields to look into.

    The last bytes of a message count as so many elements, unread. So a tensor is passed with three looks: its key, its
    value, its numbers. A pass has thousands of tensors: `check_message_elements` takes four times as long.
    """
    elements = 0
    while end - at > _UNREAD and elements <= enough:
        tag, size = content[at], content[at + 1]
        if tag & 0x87 == _LENGTH_DELIMITED:  # a number below 16 and a length: every large field that we know
            if size < 0x80:
                at += 2
            elif (high := content[at + 2]) < 0x80:
                size = size & 0x7F | high << 7
                at += 3
            else:
                size, at = _varint(content, at + 1, end)
            number, stop = tag >> 3, at + size
        else:
            number, at, stop = next(_fields(content, at, end), (0, end, end + 1))
            elements += _SLOW_LOOK
        if stop > end:
            return elements
        elements += 1
        if (kind := growing.get(number)) is not None:
            elements += _most_elements(content, at, stop, kind, enough) if kind else stop - at
        at = stop
    return elements + end - at


_PACKED_NUMBERS: Final[dict[int, Any]] = {}
"""Stands for a list of numbers, which has no fields."""
_growing: dict[str, dict[int, Any] | None] = {}


def _growing_of(descriptor: Any) -> dict[int, Any] | None:
    """Return the fields of a message type of whose bytes many objects can be made, with theirs. None if nothing repeats
    in it: however often its fields come, the last ones count."""
    name = descriptor.full_name
    if name not in _growing:
        fields = {}
        for field in descriptor.fields:
            if field.is_packed:
                fields[field.number] = _PACKED_NUMBERS
            elif field.message_type is not None and (inside := _growing_of(field.message_type)) is not None:
                fields[field.number] = inside
        repeats = any(field.is_repeated for field in descriptor.fields)
        _growing[name] = fields if fields or repeats else None
    return _growing[name]


_UNREAD: Final = 16
"""Bytes. The dtype and the shape of a tensor take eight."""
_SLOW_LOOK: Final = 15
"""What a field without a length counts besides, as in a list of numbers that is not packed: it takes a microsecond."""
_PACKED: Final = object()
_inner: dict[str, dict[int, Any]] = {}


def _inner_of(descriptor: Any) -> dict[int, Any]:
    """Return the fields of a message type that hold messages (with their type) or packed numbers."""
    known = _inner.get(descriptor.full_name)
    if known is None:
        known = _inner[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                known[field.number] = field.message_type
            elif field.is_packed:
                known[field.number] = _PACKED
    return known


def fields_before(content: bytes, field: int) -> bytes:
    """Return the part of a protobuf message before the first entry of a field, if it has few fields; else nothing.

    Writers put fields in the order of their numbers, so that this is the envelope of a body whose datums are not read.
    """
    behind = 0
    for number, _, end in islice(_fields(content, 0, len(content)), _MOST_ENVELOPE_FIELDS):
        if number == field:
            return content[:behind]
        behind = end
    return b""


def _fields(content: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of each field with a length. Ends silently where the bytes make no sense."""
    while at < end:
        tag = content[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _varint(content, at, end)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            # Lengths of one and two bytes without a call: a pass has thousands of them.
            if at < end and (size := content[at]) < 0x80:
                at += 1
            elif at + 1 < end and (high := content[at + 1]) < 0x80:
                size = size & 0x7F | high << 7
                at += 2
            else:
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
        elif kind in _GROUP_ENDS:
            # Nobody writes groups any more, but decoders skip them: what follows one must be counted all the same.
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
