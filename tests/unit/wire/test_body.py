"""Content encodings: what was compressed comes back, and hostile content is refused with a reason."""

from __future__ import annotations

import gzip
import io
import random
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ValidationError
from tinkex.wire.body import PROTOBUF, Body, compress, decompress


@given(st.binary(max_size=5_000))
def test_a_compressed_body_unfolds_to_the_same_bytes(content: bytes) -> None:
    body = compress(Body(content, PROTOBUF))
    assert (body.content_type, body.content_encoding) == (PROTOBUF, "zstd")
    assert decompress(body.content, body.content_encoding) == content


def test_a_body_is_compressed_once() -> None:
    once = compress(Body(b"x" * 1000))
    assert compress(once) is once


def test_a_zstd_stream_without_a_size_in_its_header_is_read() -> None:
    out = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
        writer.write(b"abc" * 100_000)
    assert decompress(out.getvalue(), "zstd") == b"abc" * 100_000


@pytest.mark.parametrize("encoding", [None, "", "identity", "Identity"])
def test_no_encoding_leaves_the_content_alone(encoding: str | None) -> None:
    assert decompress(b"x", encoding) == b"x"


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
def test_gzip_is_read(encoding: str) -> None:
    assert decompress(gzip.compress(b"hello"), encoding) == b"hello"


@pytest.mark.parametrize(("pack", "encoding"), [(zstandard.compress, "zstd"), (gzip.compress, "gzip")])
def test_a_bomb_is_stopped_at_the_limit(pack: Callable[[bytes], bytes], encoding: str) -> None:
    bomb = pack(bytes(50_000_000))
    with pytest.raises(ValidationError, match="more than 1,000,000 bytes"):
        decompress(bomb, encoding, limit_bytes=1_000_000)


def test_a_zstd_bomb_never_unfolds_in_memory() -> None:
    out = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
        for _ in range(400):
            writer.write(bytes(1_000_000))
    bomb = out.getvalue()
    tracemalloc.start()
    with pytest.raises(ValidationError):
        decompress(bomb, "zstd", limit_bytes=1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150_000_000


def test_unfolding_gzip_does_not_copy_the_whole_rest_for_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: 40 MB that unfold to as much were copied ten times, and a gigabyte 250 times."""
    rests: list[int] = []
    make = zlib.decompressobj

    class Watched:
        def __init__(self, wbits: int) -> None:
            self._reader = make(wbits)

        def decompress(self, rest: bytes, most_bytes: int) -> bytes:
            rests.append(len(rest))
            return self._reader.decompress(rest, most_bytes)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reader, name)

    content = random.Random(7).randbytes(40_000_000)
    packed = gzip.compress(content, compresslevel=0)
    monkeypatch.setattr(zlib, "decompressobj", Watched)
    assert decompress(packed, "gzip") == content
    assert sum(rests) < 2 * len(packed)


@pytest.mark.parametrize(("pack", "encoding"), [(zstandard.compress, "zstd"), (gzip.compress, "gzip")])
def test_content_that_is_cut_or_broken_is_refused(pack: Callable[[bytes], bytes], encoding: str) -> None:
    whole = pack(bytes(range(256)) * 100)
    with pytest.raises(ValidationError, match="breaks off"):
        decompress(whole[:-5], encoding)
    with pytest.raises(ValidationError, match="cannot be read"):
        decompress(b"not compressed at all", encoding)


def test_an_unknown_encoding_names_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"'br' is not known here\. Use zstd, gzip or none"):
        decompress(b"", "br")
