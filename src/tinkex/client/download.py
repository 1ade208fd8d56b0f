"""Downloads checkpoint files: in pieces, with progress, resumed after a break, checked against the service's checksum.

A file is written beside its place as `name.part` and moved there when it is whole and right: a file that has its name
is complete. The addresses are short-lived and signed; no key is sent to them, and they appear in no message.
"""

from __future__ import annotations

import base64
import hashlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tinkex.client._call import hint_of
from tinkex.client._connection import Connection
from tinkex.client._retry import RetryPolicy
from tinkex.client._transport import Headers
from tinkex.client._worker import in_thread
from tinkex.errors import APIConnectionError, APIError, Response, TinkexError, status_error
from tinkex.wire.endpoints import Pool

PIECE = 1 << 20


class Progress(NamedTuple):
    """How far a file has come. `total_bytes` is None when the service does not say."""

    file: str
    done_bytes: int
    total_bytes: int | None


async def download(
    connection: Connection,
    url: str,
    target: Path,
    *,
    sha256: str | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> Path:
    """Fetch `url` to `target`, going on from what is already there. Loop thread."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    policy = RetryPolicy(max_attempts=connection.config.max_retries, budget_s=connection.config.unreachable_s)
    started = connection.clock.now()
    attempt = 0
    while True:
        before = _held(part)
        try:
            expected = await _fetch(connection, url, part, progress)
            break
        except APIError as problem:
            now = connection.clock.now()
            if _held(part) > before:
                attempt, started = 0, now  # it moved: a slow line is not a dead one
            delay_s = policy.delay(attempt, now - started, hint_of(problem, connection), random.random)
            attempt += 1
            if not problem.retryable or delay_s is None:
                raise
            await connection.clock.sleep(delay_s)
    # Hashing gigabytes takes seconds: not on the loop.
    return await in_thread(lambda: _settle(part, target, sha256 or expected), "tinkex-checksum")


async def _fetch(
    connection: Connection, url: str, part: Path, progress: Callable[[Progress], object] | None
) -> str | None:
    """One attempt, from where the part file ends. Returns the checksum the service announced, if any."""
    offset = _held(part)
    headers = {"accept-encoding": "identity"}
    if offset:
        headers["range"] = f"bytes={offset}-"
    name = part.name.removesuffix(".part")
    async with connection.transport.open(Pool.TRAIN, "GET", url, headers, b"", connection.config.timeout_s) as answer:
        if answer.status == 416 and offset:
            _discard(part)  # the file there is shorter than what we hold: it is another file
            raise APIConnectionError(None, f"{name}: the file on the service changed; starting over.")
        if answer.status >= 400:
            raise status_error(Response(answer.status, dict(answer.headers.items())), f"while downloading {name}")
        if answer.status != 206:
            offset = 0  # the service sends it whole
        total = _total(answer.headers, offset)
        with part.open("ab" if offset else "wb") as file:
            async for piece in answer.chunks():
                file.write(piece)
                offset += len(piece)
                if progress is not None:
                    progress(Progress(name, offset, total))
        if total is not None and offset < total:
            raise APIConnectionError(None, f"{name}: the connection ended at {offset:,} of {total:,} bytes.")
        return _announced(answer.headers)


def _held(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)


def _settle(part: Path, target: Path, expected: str | None) -> Path:
    _verify(part, expected)
    return part.replace(target)


def _total(headers: Headers, offset: int) -> int | None:
    span = re.fullmatch(r"bytes \d+-\d+/(\d+)", headers.get("content-range") or "")
    if span:
        return int(span[1])
    length = headers.get("content-length") or ""
    return offset + int(length) if length.isdigit() else None


def _announced(headers: Headers) -> str | None:
    """A sha-256 in hex from the headers that services use for it."""
    for name in ("x-checksum-sha256", "x-amz-meta-sha256"):
        if found := headers.get(name):
            return found.strip().lower()
    digest = re.search(r"sha-256=:?([A-Za-z0-9+/]{43}=)", headers.get("repr-digest") or headers.get("digest") or "")
    return base64.b64decode(digest[1]).hex() if digest else None


def _verify(part: Path, expected: str | None) -> None:
    if expected is None:
        return
    digest = hashlib.sha256()
    with part.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    if digest.hexdigest() != expected:
        part.unlink()
        raise TinkexError(
            f"{part.name.removesuffix('.part')} arrived damaged: its sha256 is {digest.hexdigest()[:12]}…, the service "
            f"announced {expected[:12]}…. The file was deleted; download it again."
        )
