"""The reader of tar archives that somebody else made."""

from __future__ import annotations

import io
import random
import tarfile
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.damage import damaged
from tinkex.archive import BLOCK, BadArchive, members

GOOD = {"a.json": b"{}", "sub/b.safetensors": bytes(range(256)) * 9}


def tar(files: dict[str, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def header(name: bytes = b"x", size: bytes = b"00000000000\0", kind: bytes = b"0") -> bytes:
    raw = bytearray(BLOCK)
    raw[: len(name)], raw[124:136], raw[156:157] = name, size, kind
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw):06o}\0 ".encode()
    return bytes(raw)


def contents(archive: bytes, max_members: int = 100, max_bytes: int = 1 << 30) -> dict[str, bytes]:
    return {
        member.name: b"".join(member.blocks())
        for member in members(io.BytesIO(archive), max_members, max_bytes)
        if member.is_file
    }


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["short", "deep/" * 30 + "name", "n" * 90, "ü/ß", "x" * 200])
def test_what_tarfile_writes_is_read_the_same(form: int, name: str) -> None:
    files = GOOD | {name: b"content"}
    try:
        archive = tar(files, form)
    except ValueError:
        pytest.skip("this form has no place for so long a name")
    assert contents(archive) == files


def test_content_that_is_not_read_is_skipped() -> None:
    assert [member.name for member in members(io.BytesIO(tar(GOOD)), 10, 10_000)] == list(GOOD)


def test_sizes_in_binary_are_read() -> None:
    archive = header(b"big", b"\x80" + (5).to_bytes(11, "big")) + b"12345".ljust(BLOCK, b"\0") + bytes(2 * BLOCK)
    assert contents(archive) == {"big": b"12345"}


BINARY_MINUS_512 = (-512).to_bytes(12, "big", signed=True)
BAD: dict[str, Callable[[], bytes]] = {
    "a negative size that points back at its own header": lambda: header() + header(b"y", BINARY_MINUS_512) * 20,
    "an enormous binary size": lambda: header(size=b"\x80" + b"\xff" * 11),
    "a size of letters": lambda: header(size=b"lots\0\0\0\0\0\0\0\0"),
    "more content than the file has": lambda: header(size=b"00000010000\0") + b"x" * BLOCK,
    "a symbolic link": lambda: header(kind=b"2"),
    "a device": lambda: header(kind=b"3"),
    "an unknown kind": lambda: header(kind=b"?"),
    "a wrong checksum": lambda: header().replace(b"x", b"y", 1),
    "nothing": lambda: b"",
    "half a header": lambda: header()[:100],
    "text": lambda: b"not a tar at all" * 100,
    "a pax record longer than its header": lambda: _pax(b"99999999 path=x\n"),
    "a pax record of no length": lambda: _pax(b"0 path=x\n"),
    "a pax record without a length": lambda: _pax(b"path=x\n"),
    "a negative pax size": lambda: _pax(b"12 size=-512\n") + header() + bytes(BLOCK),
    "a pax header of many records": lambda: _pax(b"6 a=b\n" * 1001),
    "a pax header of megabytes": lambda: header(kind=b"x", size=b"00100000000\0"),
    "a chain of long names": lambda: b"".join(_extension(b"L", b"n" * 100) for _ in range(200)),
    "a name of kilobytes": lambda: _extension(b"L", b"n" * 5000) + header(),
    "a sparse file": lambda: _pax(b"22 GNU.sparse.major=1\n") + header(),
    "too many members": lambda: header() * 101,
    "too many bytes": lambda: tar({"a": bytes(2000), "b": bytes(2000)}),
}


def _extension(kind: bytes, content: bytes) -> bytes:
    return header(b"ext", f"{len(content):011o}\0".encode(), kind) + content + bytes(-len(content) % BLOCK)


def _pax(records: bytes) -> bytes:
    return _extension(b"x", records)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_archive_is_rejected_at_once(name: str) -> None:
    with pytest.raises(BadArchive):
        contents(BAD[name](), max_bytes=3000)


@pytest.mark.timing
def test_a_hundred_kilobytes_of_pax_header_take_no_time() -> None:
    """With `tarfile` of Python 3.11.7 the same bytes took 17 s, and held the interpreter for as long."""
    hostile = _pax(b"1" * 100_000 + b" ")
    began = time.process_time()
    with pytest.raises(BadArchive):
        contents(hostile)
    assert time.process_time() - began < 0.5


def test_damaged_archives_end_in_an_error_or_in_files() -> None:
    """Bytes changed at random: never another exception, never more bytes than there are."""
    chance = random.Random(7)
    good = tar(GOOD | {"p" * 150: b"long"}, tarfile.PAX_FORMAT)
    for _ in range(3000):
        archive = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            archive[chance.randrange(len(archive))] = chance.randrange(256)
        try:
            read = contents(bytes(archive[: chance.randint(1, len(archive))]))
        except BadArchive:
            continue
        assert sum(map(len, read.values())) <= len(archive)


# -- any bytes --------------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=120)
FILES = st.dictionaries(NAMES.filter(lambda name: name.strip() == name), st.binary(max_size=700), max_size=3)
FORMS = st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


@settings(max_examples=100, deadline=None)
@given(FILES, FORMS)
def test_any_files_read_back_as_they_were_packed(files: dict[str, bytes], form: int) -> None:
    assert contents(tar(files, form)) == files


@settings(max_examples=200, deadline=None)
@given(damaged(st.builds(tar, FILES, FORMS)) | st.binary(max_size=1200))
def test_any_bytes_are_an_archive_or_a_bad_one(archive: bytes) -> None:
    try:
        read = contents(archive, max_members=20, max_bytes=5000)
    except BadArchive as error:
        assert str(error)
        return
    assert sum(map(len, read.values())) <= min(5000, len(archive))


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=12, max_size=12), st.sampled_from(list(b"01234567LKxgSV\0")))
def test_any_size_in_a_header_is_read_or_rejected(size: bytes, kind: int) -> None:
    try:
        contents(header(size=size, kind=bytes((kind,))) + bytes(3 * BLOCK), max_bytes=5000)
    except BadArchive:
        pass


def test_headers_count_towards_the_limit_of_an_archive() -> None:
    """Ten thousand headers of a megabyte each would be ten gigabytes to read, from a few megabytes of gzip."""
    record = b"1000000 comment=".ljust(999_999, b"x") + b"\n"
    pax = header(size=b"%011o\0" % len(record), kind=b"x") + record.ljust(-(-len(record) // BLOCK) * BLOCK, b"\0")
    assert contents(pax * 6 + header(b"x") + bytes(2 * BLOCK), max_bytes=6_000_000) == {"x": b""}
    with pytest.raises(BadArchive, match="larger than 5,000,000 bytes"):
        contents(pax * 6 + bytes(2 * BLOCK), max_bytes=5_000_000)
