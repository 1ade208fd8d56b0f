"""Downloads one file: in pieces, with progress, resumed after a break, checked against the service's checksum.

A file is written as `name.part` beside its path and renamed when it is whole and right: a file that has its name
is complete. What was begun is gone on with only if it can be shown to be the same file: by its validator (an ETag or a
date, kept in `name.part.tag`), or by a checksum at the end. The addresses are short-lived and signed; no key is sent to
them, and they appear in no message.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin

from tinkex.client._calls.attempts import Attempts
from tinkex.client._calls.send import DOWNLOAD, open_download
from tinkex.client._http.transport import REDIRECTS, Headers, StreamedResponse
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.loop import in_thread
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIConnectionError, APIError, Response, TinkexError, status_error

UNANNOUNCED_BYTES = 64 << 30
"""Of a file whose size the service does not say: no adapter has as much, and an endless one must not fill the disk."""


class DownloadProgress(NamedTuple):
    """How much of a file has been fetched. `total_bytes` is None when the service does not say."""

    file: str
    done_bytes: int
    total_bytes: int | None


Watcher = Callable[[DownloadProgress], object]


class DownloadPart:
    """The part of a file that has been fetched so far."""

    def __init__(self, target: Path) -> None:
        self.name = target.name
        self.path = target.with_name(target.name + ".part")
        self._tag = target.with_name(target.name + ".part.tag")

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def tag(self) -> str | None:
        """The validator of this version; "" if only a checksum can identify it; None if nothing can."""
        return self._tag.read_text(encoding="utf-8") if self._tag.exists() else None

    def begin(self, headers: Headers, has_checksum: bool) -> None:
        """Start over with the version that a response brings."""
        self.discard()
        tag = _validator(headers)
        if tag or has_checksum:
            self._tag.write_text(tag, encoding="utf-8")

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._tag.unlink(missing_ok=True)

    def settle(self, target: Path, expected: str | None) -> Path:
        """Check what was fetched and rename it to `target`."""
        with _disk(target):
            if expected is not None:
                self._verify(expected)
            self.path.replace(target)
            self._tag.unlink(missing_ok=True)
        return target

    def _verify(self, expected: str) -> None:
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected:
            self.discard()
            raise TinkexError(
                f"{self.name} arrived damaged: its sha256 is {digest[:12]}…, the service announced "
                f"{expected[:12]}…. What was fetched is deleted; download it again."
            )


async def download(
    link: ServiceLink, url: str, target: Path, *, sha256: str | None = None, progress: Watcher | None = None
) -> Path:
    """Fetch `url` to `target`, going on from what is already there. Loop thread; so is `progress`."""
    with _disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    attempts = DownloadAttempts(link, url, DownloadPart(target), sha256, progress)
    announced = await attempts.run(attempts.fetch)
    expected = sha256.lower() if sha256 else announced
    # Hashing gigabytes takes seconds: not on the loop.
    return await in_thread(lambda: attempts.part.settle(target, expected), "tinkex-checksum")


class DownloadAttempts(Attempts):
    """Fetches one file. Failures count only while nothing arrives: a slow line that moves is not a dead one."""

    def __init__(
        self, link: ServiceLink, url: str, part: DownloadPart, sha256: str | None, progress: Watcher | None
    ) -> None:
        super().__init__(link, Operation(DOWNLOAD.name, link.clock.now()), DOWNLOAD.name)
        self.part = part
        self._url = url
        self._sha256 = sha256
        self._progress = progress
        self._bytes_before = 0
        self._faults = 0

    def delay_after(self, error: APIError, attempt: int) -> float:
        now = self.link.clock.now()
        if self.part.size_bytes > self._bytes_before:
            self._faults, self.started_at = 0, now
            self.operation.created_at = now
        self.note(error)
        self._faults += 1
        delay_s = self.policy.delay(self._faults - 1, now - self.started_at, self.hint_s(error))
        if delay_s is None:
            raise error
        self.link.stats.retries += 1
        self.emit_retry(attempt, delay_s, self.operation.last_error or "")
        return delay_s

    async def fetch(self, attempt: int) -> str | None:
        """Fetch once, from where the part ends. Returns the checksum the service announced, if any."""
        part = self.part
        self._bytes_before = part.size_bytes
        tag = part.tag
        offset = self._bytes_before if tag is not None or self._sha256 else 0
        headers = {"accept-encoding": "identity"}
        if offset:
            headers["range"] = f"bytes={offset}-"
            if tag:
                headers["if-range"] = tag
        try:
            response = await self._open(headers, attempt)
            try:
                return await self._receive(response, offset, tag)
            finally:
                response.close()
        except APIConnectionError as error:
            # The HTTP library names the whole address, which is signed: who has it, has the file.
            text = re.sub(r"https?://[^\s)\"']+", "<address>", str(error))
            shown = type(error)(None, f"{part.name}: {text}")
            shown.retryable = error.retryable  # an untrusted certificate stays final
            raise shown from None

    async def _open(self, headers: dict[str, str], attempt: int) -> StreamedResponse:
        """Return the response, after redirects: these may lead to another host, because no key is sent."""
        url = self._url
        for _ in range(REDIRECTS):
            response = await open_download(self.link, url, headers, attempt)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            response.close()
            try:
                target = urljoin(url, response.headers.get("location") or "")
            except ValueError:
                raise APIError(f"{self.part.name}: the download was redirected to what is no address.") from None
            if url.startswith("https:") and not target.startswith("https:"):
                raise APIError(f"{self.part.name}: the download was redirected to an address without encryption.")
            url = target
        raise APIError(f"{self.part.name}: more than {REDIRECTS} redirects.")

    async def _receive(self, response: StreamedResponse, offset: int, tag: str | None) -> str | None:
        part = self.part
        announced = _announced(response.headers)
        span = _span(response.headers)
        if response.status == 416 and offset and span.total == offset:
            return announced  # all of it was here already
        if response.status not in (200, 206) and not (response.status == 416 and offset):
            headers = dict(response.headers.items())
            raise status_error(Response(response.status, headers), f"while downloading {part.name}")
        validator = _validator(response.headers)
        is_other = bool(tag and validator and validator != tag)  # not every service heeds `if-range`
        if offset and response.status != 200 and (span.start != offset or is_other):
            with _disk(part.path):
                part.discard()
            raise APIConnectionError(None, "the file changed on the service; starting over.")
        total = span.total
        if response.status == 200:
            length = response.headers.get("content-length") or ""
            offset, total = 0, int(length) if re.fullmatch("[0-9]{1,18}", length) else None
            with _disk(part.path):
                part.begin(response.headers, bool(self._sha256 or announced))
        offset = await self._append(response, offset, total)
        if total is not None and offset != total:
            raise APIConnectionError(None, f"the connection ended at {offset:,} of {total:,} bytes.")
        return announced

    async def _append(self, response: StreamedResponse, offset: int, total: int | None) -> int:
        """Append the body to the part; return how many bytes it has then."""
        part, progress = self.part, self._progress
        with _disk(part.path):
            file = part.path.open("ab")
        with file:
            if progress is not None:
                progress(DownloadProgress(part.name, offset, total))
            limit = UNANNOUNCED_BYTES if total is None else total
            async for chunk in response.chunks():
                if offset + len(chunk) > limit:
                    raise APIError(f"{part.name}: the service sends more than the {limit:,} bytes of this file.")
                with _disk(part.path):
                    file.write(chunk)
                    file.flush()  # what is counted is on the disk; closing has nothing left to fail on
                offset += len(chunk)
                if progress is not None:
                    progress(DownloadProgress(part.name, offset, total))
        return offset


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Only for calls that touch the disk: a full one is no fault of the service, and no reason to try again."""
    try:
        yield
    except OSError as error:
        raise TinkexError(f"{path} cannot be written: {error.strerror or error}.") from error


class _Span(NamedTuple):
    """What `content-range` says."""

    start: int | None
    total: int | None


def _span(headers: Headers) -> _Span:
    match = re.fullmatch(r"bytes (?:([0-9]{1,18})-[0-9]{1,18}|\*)/([0-9]{1,18}|\*)", headers.get("content-range") or "")
    if match is None:
        return _Span(None, None)
    return _Span(int(match[1]) if match[1] else None, int(match[2]) if match[2] != "*" else None)


def _validator(headers: Headers) -> str:
    """What names this version of the file. A weak ETag does not promise the same bytes."""
    tag = headers.get("etag") or ""
    return tag if tag and not tag.startswith("W/") else headers.get("last-modified") or ""


def _announced(headers: Headers) -> str | None:
    """A sha-256 in hex from the headers that services use for it."""
    for name in ("x-checksum-sha256", "x-amz-meta-sha256"):
        if checksum := headers.get(name):
            return checksum.strip().lower()
    digest = re.search(r"sha-256=:?([A-Za-z0-9+/]{43}=)", headers.get("repr-digest") or headers.get("digest") or "")
    return base64.b64decode(digest[1]).hex() if digest else None
