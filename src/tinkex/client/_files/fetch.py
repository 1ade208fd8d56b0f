"""Downloads one file: in pieces, with progress, resumed after a break, checked against the service's checksum.

A file is written beside its place as `name.part` and moved there when it is whole and right: a file that has its name
is complete. What was begun is gone on with only if it can be shown to be the same file: by its validator (an ETag or a
date, kept in `name.part.tag`), or by a checksum at the end. The addresses are short-lived and signed; no key is sent to
them, and they appear in no message.
"""

from __future__ import annotations

import base64
import hashlib
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin

from tinkex.client._calls.call import hint_of
from tinkex.client._calls.retry import RetryPolicy
from tinkex.client._http.transport import REDIRECTS, Headers, StreamedAnswer
from tinkex.client._runtime.link import Connection
from tinkex.client._runtime.worker_threads import in_thread
from tinkex.errors import APIConnectionError, APIError, Response, TinkexError, status_error
from tinkex.wire.endpoints import Pool

PIECE = 1 << 20


class Progress(NamedTuple):
    """How far a file has come. `total_bytes` is None when the service does not say."""

    file: str
    done_bytes: int
    total_bytes: int | None


Watcher = Callable[[Progress], object]


class Part:
    """What is held of a file that is not whole yet."""

    def __init__(self, target: Path) -> None:
        self.name = target.name
        self.path = target.with_name(target.name + ".part")
        self._tag = target.with_name(target.name + ".part.tag")

    @property
    def held_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def tag(self) -> str | None:
        """The validator of the version held; "" if only a checksum can tell; None if nothing can."""
        return self._tag.read_text(encoding="utf-8") if self._tag.exists() else None

    def begin(self, headers: Headers, has_checksum: bool) -> None:
        """Start over with the version that an answer brings."""
        self.discard()
        tag = _validator(headers)
        if tag or has_checksum:
            self._tag.write_text(tag, encoding="utf-8")

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._tag.unlink(missing_ok=True)

    def settle(self, target: Path, expected: str | None) -> Path:
        """Check what was fetched and give it its name."""
        with _disk(target):
            if expected is not None:
                self._verify(expected)
            self.path.replace(target)
            self._tag.unlink(missing_ok=True)
        return target

    def _verify(self, expected: str) -> None:
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
        if digest.hexdigest() != expected:
            self.discard()
            raise TinkexError(
                f"{self.name} arrived damaged: its sha256 is {digest.hexdigest()[:12]}…, the service announced "
                f"{expected[:12]}…. What was fetched is deleted; download it again."
            )


async def download(
    connection: Connection, url: str, target: Path, *, sha256: str | None = None, progress: Watcher | None = None
) -> Path:
    """Fetch `url` to `target`, going on from what is already there. Loop thread; so is `progress`."""
    with _disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    part = Part(target)
    policy = RetryPolicy(max_attempts=connection.config.max_retries, budget_s=connection.config.unreachable_s)
    started = connection.clock.now()
    attempt = 0
    while True:
        before = part.held_bytes
        try:
            announced = await _fetch(connection, url, part, sha256, progress)
            break
        except APIError as problem:
            now = connection.clock.now()
            if part.held_bytes > before:
                attempt, started = 0, now  # it moved: a slow line is not a dead one
            delay_s = policy.delay(attempt, now - started, hint_of(problem, connection), random.random)
            attempt += 1
            if not problem.retryable or delay_s is None:
                raise
            await connection.clock.sleep(delay_s)
    expected = sha256.lower() if sha256 else announced
    # Hashing gigabytes takes seconds: not on the loop.
    return await in_thread(lambda: part.settle(target, expected), "tinkex-checksum")


async def _fetch(
    connection: Connection, url: str, part: Part, sha256: str | None, progress: Watcher | None
) -> str | None:
    """One attempt, from where the part ends. Returns the checksum the service announced, if any."""
    tag = part.tag
    offset = part.held_bytes if tag is not None or sha256 else 0
    headers = {"accept-encoding": "identity"}
    if offset:
        headers["range"] = f"bytes={offset}-"
        if tag:
            headers["if-range"] = tag
    async with _opened(connection, url, headers, part.name) as answer:
        announced = _announced(answer.headers)
        span = _span(answer.headers)
        if answer.status == 416 and offset and span.total == offset:
            return announced  # all of it was here already
        if answer.status not in (200, 206) and not (answer.status == 416 and offset):
            raise status_error(Response(answer.status, dict(answer.headers.items())), f"while downloading {part.name}")
        if offset and answer.status != 200 and (span.start != offset or _is_other(answer.headers, tag)):
            with _disk(part.path):
                part.discard()
            raise APIConnectionError(None, "the file changed on the service; starting over.")
        total = span.total
        if answer.status == 200:
            offset, total = 0, _length(answer.headers)
            with _disk(part.path):
                part.begin(answer.headers, bool(sha256 or announced))
        with _disk(part.path):
            file = part.path.open("ab")
        with file:
            if progress is not None:
                progress(Progress(part.name, offset, total))
            async for piece in answer.chunks():
                with _disk(part.path):
                    file.write(piece)
                    file.flush()  # what is counted is on the disk; closing has nothing left to fail on
                offset += len(piece)
                if progress is not None:
                    progress(Progress(part.name, offset, total))
        if total is not None and offset != total:
            raise APIConnectionError(None, f"the connection ended at {offset:,} of {total:,} bytes.")
        return announced


@asynccontextmanager
async def _opened(
    connection: Connection, url: str, headers: dict[str, str], name: str
) -> AsyncIterator[StreamedAnswer]:
    """The answer, after redirects: these may lead to another host, because no key is sent."""
    try:
        for _ in range(REDIRECTS):
            timeout_s = connection.config.timeout_s
            async with connection.transport.open(Pool.TRAIN, "GET", url, headers, b"", timeout_s) as answer:
                if answer.status not in (301, 302, 303, 307, 308):
                    yield answer
                    return
                target = urljoin(url, answer.headers.get("location") or "")
                if url.startswith("https:") and not target.startswith("https:"):
                    raise APIError(f"{name}: the download was redirected to an address without encryption.")
                url = target
        raise APIError(f"{name}: more than {REDIRECTS} redirects.")
    except APIConnectionError as problem:
        # The HTTP library names the whole address, which is signed: who has it, has the file.
        text = re.sub(r"https?://[^\s)\"']+", "<address>", str(problem))
        raise type(problem)(None, f"{name}: {text}") from None


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Only for calls that touch the disk: a full one is no fault of the service, and no reason to try again."""
    try:
        yield
    except OSError as problem:
        raise TinkexError(f"{path} cannot be written: {problem.strerror or problem}.") from problem


class _Span(NamedTuple):
    """What `content-range` says."""

    start: int | None
    total: int | None


def _span(headers: Headers) -> _Span:
    found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", headers.get("content-range") or "")
    if found is None:
        return _Span(None, None)
    return _Span(int(found[1]) if found[1] else None, int(found[2]) if found[2] != "*" else None)


def _length(headers: Headers) -> int | None:
    text = headers.get("content-length") or ""
    return int(text) if text.isdigit() else None


def _validator(headers: Headers) -> str:
    """What names this version of the file. A weak ETag does not promise the same bytes."""
    tag = headers.get("etag") or ""
    return tag if tag and not tag.startswith("W/") else headers.get("last-modified") or ""


def _is_other(headers: Headers, tag: str | None) -> bool:
    """Whether a partial answer is of another version: not every service heeds `if-range`."""
    found = _validator(headers)
    return bool(tag and found and found != tag)


def _announced(headers: Headers) -> str | None:
    """A sha-256 in hex from the headers that services use for it."""
    for name in ("x-checksum-sha256", "x-amz-meta-sha256"):
        if found := headers.get(name):
            return found.strip().lower()
    digest = re.search(r"sha-256=:?([A-Za-z0-9+/]{43}=)", headers.get("repr-digest") or headers.get("digest") or "")
    return base64.b64decode(digest[1]).hex() if digest else None
