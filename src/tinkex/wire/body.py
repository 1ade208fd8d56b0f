"""Bodies of requests and responses: bytes, content type, content encoding; compresses and decompresses them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from tinkex.errors import ValidationError

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

MAX_BYTES = 1 << 30
"""The largest decompressed body: 200 times the official client's largest chunk of training data."""

# zstd unfolds one byte into at most 32 KiB (a repeated block), so a step overshoots the limit by 32 MiB at worst.
_STEP = 1 << 10
_GZIP_STEP = 1 << 18
_PIECE = 4 << 20


class Body(NamedTuple):
    """The body of a request: made once, sent unchanged on every attempt."""

    content: bytes
    content_type: str = JSON
    content_encoding: str | None = None


def compress(body: Body) -> Body:
    """The same body under zstd; a body that is already compressed stays as it is."""
    if body.content_encoding is not None:
        return body
    import zstandard

    return body._replace(content=zstandard.ZstdCompressor().compress(body.content), content_encoding="zstd")


def decompress(content: bytes, encoding: str | None, limit_bytes: int = MAX_BYTES) -> bytes:
    """Undo a Content-Encoding. Rejects unknown ones, broken content, and content that unfolds beyond the limit."""
    return b"".join(decompressed(content, encoding, limit_bytes))


def decompressed(content: bytes, encoding: str | None, limit_bytes: int = MAX_BYTES) -> Iterator[bytes]:
    """Do what `decompress` does in pieces of some megabytes, so that a caller can stop after each."""
    word = (encoding or "identity").strip().lower()
    if word == "identity":
        yield content
        return
    if word not in _UNFOLD:
        raise ValidationError(f"Content-Encoding {encoding!r} is not known here. Use zstd, gzip or none.")
    size, piece = 0, bytearray()
    error: ValidationError | None = None
    try:
        for step in _UNFOLD[word](content, limit_bytes):
            if step is None:
                raise ValidationError(f"The {word} body breaks off before its end ({len(content):,} bytes arrived).")
            size += len(step)
            piece += step
            if size > limit_bytes:
                raise ValidationError(
                    f"The {word} body unfolds to more than {limit_bytes:,} bytes. Send smaller chunks."
                )
            if len(piece) >= _PIECE:
                yield bytes(piece)
                piece = bytearray()
    except ValidationError as problem:
        error = problem
    yield bytes(piece)  # also before an error: the caller counts what was made
    if error is not None:
        raise error


def _unzstd(content: bytes, limit_bytes: int) -> Iterator[bytes | None]:
    """Yield plain bytes; None at the end if the content is not whole."""
    import zstandard

    try:
        # The size in a frame's header is only a claim; going step by step does not rely on it.
        reader = zstandard.ZstdDecompressor().decompressobj()
        for start in range(0, len(content), _STEP):
            yield reader.decompress(content[start : start + _STEP])
    except zstandard.ZstdError as error:
        raise ValidationError(f"The zstd body cannot be read: {error}.") from None
    if not reader.eof:
        yield None


def _gunzip(content: bytes, limit_bytes: int) -> Iterator[bytes | None]:
    """Yield plain bytes; None at the end if the content is not whole."""
    reader, most_bytes = zlib.decompressobj(wbits=31), min(_PIECE, limit_bytes + 1)
    try:
        for start in range(0, len(content), _GZIP_STEP):
            # The reader copies what it has not consumed yet: of a step, not of all the rest.
            rest = content[start : start + _GZIP_STEP]
            while rest and not reader.eof:
                yield reader.decompress(rest, most_bytes)
                rest = reader.unconsumed_tail
            if reader.eof:
                break
    except zlib.error as error:
        raise ValidationError(f"The gzip body cannot be read: {error}.") from None
    if not reader.eof:
        yield None


_UNFOLD = {"zstd": _unzstd, "gzip": _gunzip, "x-gzip": _gunzip}
