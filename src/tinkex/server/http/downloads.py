"""Sends files over HTTP, whole or in ranges, with a checksum. An archive is a tar that is built while it is sent."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinkex.server.upkeep.checksums import FileMark, mark_of
from tinkex.store.records import CheckpointRecord

ARCHIVE = "archive.tar"
_BLOCK = 1 << 20
_END_OF_TAR = bytes(2 * tarfile.BLOCKSIZE)


class FilePiece(NamedTuple):
    """Bytes to send: those in memory, or a whole file."""

    content: bytes | Path
    size: int
    mark: FileMark | None = None
    """Of a file: which one, should another be written under its name."""


@dataclass(frozen=True, slots=True)
class Download:
    """The pieces to send one after the other, and the sha256 of all of them."""

    pieces: tuple[FilePiece, ...]
    sha256: str
    media_type: str = "application/octet-stream"

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def file_of(checkpoint: CheckpointRecord, folder: Path, name: str) -> Download:
    """Return one file, with the checksum from when it was written."""
    return Download((_piece(folder / name),), str(checkpoint.files[name]["sha256"]))


def archive_of(checkpoint: CheckpointRecord, folder: Path) -> Download:
    """Return all files as a tar. Blocks: the first checksum reads all files."""
    pieces: list[FilePiece] = []
    for name in sorted(checkpoint.files):
        piece = _piece(folder / name)
        member = tarfile.TarInfo(name)
        member.size, member.mtime, member.mode = piece.size, int(checkpoint.created_at), 0o644
        header = member.tobuf(tarfile.GNU_FORMAT)
        padding = bytes(-piece.size % tarfile.BLOCKSIZE)
        pieces += [FilePiece(header, len(header)), piece, FilePiece(padding, len(padding))]
    pieces.append(FilePiece(_END_OF_TAR, len(_END_OF_TAR)))
    whole = tuple(pieces)
    return Download(whole, _sha256(whole), "application/x-tar")


class DownloadResponse(StreamingResponse):
    """A download that is being sent. `on_end` is called when it was sent, or its client has left."""

    on_end: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_end()


def respond(request: Request, download: Download, name: str, on_end: Callable[[], None]) -> Response:
    """Return the whole download, the requested range, or 416. A request for several ranges gets the whole.

    `on_end` is called once its files are not read any more.
    """
    digest = bytes.fromhex(download.sha256)
    headers = {
        "etag": f'"{download.sha256}"',
        "accept-ranges": "bytes",
        "x-checksum-sha256": download.sha256,
        "repr-digest": f"sha-256=:{base64.b64encode(digest).decode()}:",
        "content-disposition": f'attachment; filename="{name}"',
        "cache-control": "private",
        "x-content-type-options": "nosniff",
    }
    span = parse_range(request.headers.get("range"), request.headers.get("if-range"), headers["etag"], download.size)
    if span is None:
        first, last, status = 0, download.size - 1, 200
    elif span[0] > span[1]:
        on_end()
        return Response(status_code=416, headers={**headers, "content-range": f"bytes */{download.size}"})
    else:
        (first, last), status = span, 206
        headers["content-range"] = f"bytes {first}-{last}/{download.size}"
    headers["content-length"] = str(last - first + 1)
    if request.method == "HEAD":
        on_end()
        return Response(status_code=status, headers=headers, media_type=download.media_type)
    response = DownloadResponse(_read_range(download.pieces, first, last), status, headers, download.media_type)
    response.on_end = on_end
    return response


def parse_range(header: str | None, if_range: str | None, etag: str, size: int) -> tuple[int, int] | None:
    """Return the first and last byte of a range, or None for everything. First above last: the range is empty."""
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", header or "", re.ASCII)
    if match is None or match[0] == "bytes=-" or (if_range is not None and if_range != etag):
        return None
    if not match[1]:
        return max(0, size - int(match[2])), size - 1
    first = int(match[1])
    if match[2] and int(match[2]) < first:
        return None  # not a valid range: RFC 9110 has it ignored
    return first, min(int(match[2] or size), size - 1)


def _piece(file: Path) -> FilePiece:
    mark = mark_of(file)
    return FilePiece(file, mark.size, mark)


@functools.lru_cache(maxsize=256)
def _sha256(pieces: tuple[FilePiece, ...]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        for block in _blocks(piece, 0, piece.size):
            digest.update(block)
    return digest.hexdigest()


def _blocks(piece: FilePiece, first: int, size: int) -> Generator[bytes]:
    if isinstance(piece.content, bytes):
        yield piece.content[first : first + size]
        return
    with piece.content.open("rb") as file:
        file.seek(first)
        while size > 0 and (block := file.read(min(_BLOCK, size))):
            size -= len(block)
            yield block


async def _read_range(pieces: tuple[FilePiece, ...], first: int, last: int) -> AsyncIterator[bytes]:
    """Yield the bytes from `first` to `last`. Files are read in a thread."""
    for piece in pieces:
        start, stop = max(first, 0), min(last + 1, piece.size)
        if start < stop:
            blocks = _blocks(piece, start, stop - start)
            try:
                while (block := await asyncio.to_thread(next, blocks, b"")) != b"":
                    yield block
            finally:
                blocks.close()
        first, last = first - piece.size, last - piece.size
