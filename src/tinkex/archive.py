"""Reads tar archives that somebody else made: strictly forwards, with limits, and nothing but plain files and folders.

Not `tarfile`: a header with a negative size sends it back to the same header for ever (CVE-2025-8194), and pax headers
go through a regular expression that backtracks for minutes while it holds the interpreter (CVE-2024-6232). Here every
header moves on by at least 512 bytes, every number is checked before it is used, and the work is linear in the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

BLOCK: Final = 512
MAX_NAME_BYTES: Final = 4096
_MAX_PAX_BYTES: Final = 1 << 20
"""Of one pax header. Those of macOS carry file attributes of some kilobytes."""
_MAX_PAX_RECORDS: Final = 1000
_COPY_BYTES: Final = 1 << 20
_FILE, _FOLDER, _LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"0", b"5", b"L", b"K", b"x", b"g"


class BadArchive(Exception):
    """The archive cannot be read. The text is the end of a sentence: "… cannot be unpacked: <text>"."""


@dataclass(slots=True)
class Member:
    """A file or a folder in an archive. Its content can be read once, before the next member is asked for."""

    name: str
    size: int
    is_file: bool
    _content: BinaryIO
    _unread: int

    def blocks(self) -> Iterator[bytes]:
        """Yield the content piece by piece. Raises BadArchive if the archive ends in the middle of it."""
        while self._unread:
            yield self._take(min(self._unread, _COPY_BYTES))

    def _take(self, size: int) -> bytes:
        block = _read(self._content, size)
        self._unread -= size
        return block


def members(content: BinaryIO, max_members: int, max_bytes: int) -> Iterator[Member]:
    """Yield the files and folders of an uncompressed tar, in order.

    Raises BadArchive for links and devices, for more than `max_members` headers of any kind, and for files of more than
    `max_bytes` together. `content` needs `read` alone.
    """
    left_bytes, too_large = max_bytes, f"its files are larger than {max_bytes:,} bytes"
    path: str | None = None
    size_override: int | None = None
    for number in range(max_members):
        header = content.read(BLOCK)
        if header == bytes(BLOCK) or (not header and number):
            return
        size, kind = _checked_size(header), header[156:157].replace(b"\0", _FILE)
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            left_bytes -= size
            if left_bytes < 0:
                raise BadArchive(too_large)
            extension = _extension(content, size)
            if kind == _LONG_NAME:
                path = _text(extension.rstrip(b"\0"))
            elif kind == _PAX:
                path, size_override = _pax(extension, path)
            continue
        name = path or _name(header)
        size = size if size_override is None else size_override
        path = size_override = None
        if kind not in (_FILE, _FOLDER):
            raise BadArchive(f"it holds {name!r}, which is neither a file nor a folder")
        left_bytes -= size
        if left_bytes < 0:
            raise BadArchive(too_large)
        member = Member(name, size, kind == _FILE and not name.endswith("/"), content, size)
        yield member
        for _ in member.blocks():  # what the caller did not want
            pass
        _read(content, -size % BLOCK)
    if content.read(BLOCK).strip(b"\0"):
        raise BadArchive(f"it has more than {max_members} members")


def _read(content: BinaryIO, size: int) -> bytes:
    block = content.read(size)
    if len(block) != size:
        raise BadArchive("it ends in the middle of a file")
    return block


def _checked_size(header: bytes) -> int:
    """Return the size in a header, after its checksum: the sum of its bytes, with spaces for the checksum itself."""
    if len(header) != BLOCK or _octal(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * 0x20:
        raise BadArchive("it is not a tar archive, or it is damaged")
    field = header[124:136]
    # GNU writes sizes above 8 GB in binary, after a byte 0x80. Anything else with the high bit is negative or absurd.
    size = int.from_bytes(field[4:], "big") if field[:4] == b"\x80\0\0\0" else _octal(field)
    if size is None:
        raise BadArchive("a header in it has a size that is not a number")
    return size


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0")
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and b"8" not in digits and b"9" not in digits else None


def _name(header: bytes) -> str:
    name = _text(header[:100].partition(b"\0")[0])
    prefix = _text(header[345:500].partition(b"\0")[0]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(raw: bytes) -> str:
    if len(raw) > MAX_NAME_BYTES:
        raise BadArchive(f"it holds a name of {len(raw):,} bytes")
    return raw.decode("utf-8", "surrogateescape")


def _extension(content: BinaryIO, size: int) -> bytes:
    """Return the content of a header that describes the next member."""
    if size > _MAX_PAX_BYTES:
        raise BadArchive(f"a header in it has {size:,} bytes")
    extension = _read(content, size)
    _read(content, -size % BLOCK)
    return extension


def _pax(records: bytes, path: str | None) -> tuple[str | None, int | None]:
    """Return the path and size of a pax header: records of the form "<length> <key>=<value>\\n"."""
    size = None
    start = 0
    for _ in range(_MAX_PAX_RECORDS):
        if start >= len(records):
            return path, size
        space = records.find(b" ", start, start + 10)
        digits = records[start:space] if space > 0 else b""
        if not digits.isdigit() or not space - start < int(digits) <= len(records) - start:
            raise BadArchive("a pax header in it is damaged")
        key, _, value = records[space + 1 : start + int(digits) - 1].partition(b"=")
        start += int(digits)
        if key == b"path":
            path = _text(value)
        elif key == b"size":
            if not value.isdigit() or len(value) > 19:
                raise BadArchive("a header in it has a size that is not a number")
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise BadArchive("it holds a sparse file; write it with plain tar")
    raise BadArchive("a pax header in it has too many records")
