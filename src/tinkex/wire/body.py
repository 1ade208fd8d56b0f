"""Bodies of requests and responses: bytes, content type, content encoding; compresses and decompresses them."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from tinkex.errors import ValidationError

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

MAX_BYTES = 1 << 30
"""The largest decompressed body: 200 times the official client's largest chunk of training data."""

# zstd unfolds one byte into at most 32 KiB (a repeated block), so a step overshoots the limit by 32 MiB at worst.
_STEP = 1 << 10


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
    word = (encoding or "identity").strip().lower()
    if word == "identity":
        return content
    if word == "zstd":
        plain, is_whole = _unzstd(content, limit_bytes)
    elif word in ("gzip", "x-gzip"):
        plain, is_whole = _gunzip(content, limit_bytes)
    else:
        raise ValidationError(f"Content-Encoding {encoding!r} is not known here. Use zstd, gzip or none.")
    if len(plain) > limit_bytes:
        raise ValidationError(f"The {word} body unfolds to more than {limit_bytes:,} bytes. Send smaller chunks.")
    if not is_whole:
        raise ValidationError(f"The {word} body breaks off before its end ({len(content):,} bytes arrived).")
    return plain


def _unzstd(content: bytes, limit_bytes: int) -> tuple[bytes, bool]:
    import zstandard

    try:
        # The size in a frame's header is only a claim; going step by step does not rely on it.
        reader = zstandard.ZstdDecompressor().decompressobj()
        plain = bytearray()
        for start in range(0, len(content), _STEP):
            plain += reader.decompress(content[start : start + _STEP])
            if len(plain) > limit_bytes:
                break
    except zstandard.ZstdError as error:
        raise ValidationError(f"The zstd body cannot be read: {error}.") from None
    return bytes(plain), reader.eof


def _gunzip(content: bytes, limit_bytes: int) -> tuple[bytes, bool]:
    reader = zlib.decompressobj(wbits=31)
    try:
        return reader.decompress(content, limit_bytes + 1), reader.eof
    except zlib.error as error:
        raise ValidationError(f"The gzip body cannot be read: {error}.") from None
