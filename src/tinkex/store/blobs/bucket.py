"""Objects of an S3-compatible bucket by key, with deadlines and retries. Every call blocks; any thread may make it.

The library is `obstore`, loaded with the first bucket. An object is there complete or not at all: that is what S3
promises of a put. Errors say what is wrong: an object is gone (FileNotFoundError), it is not what was written
(DamagedBlob), or the bucket does not respond or rejects the credentials (BucketAway).
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from tinkex.clock import REAL, Clock
from tinkex.errors import ConfigError, MissingExtra
from tinkex.store.errors import BucketAway, DamagedBlob

logger = logging.getLogger("tinkex.store")
T = TypeVar("T")

WAIT_S = 10.0
"""How long a call tries again before it raises. Its caller has a reason to go on, or a client that comes again."""
REQUEST_S = 20
"""How long one request may take, the bytes of its body included: PIECE_BYTES at 420 kB/s."""
CONNECT_S = 3
PIECE_BYTES = 8 << 20
"""Larger objects are sent and fetched in pieces, each a request with a deadline of its own."""
FIRST_PAUSE_S = 0.2
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
CLOSE_S = 5.0
"""How long `close` waits for deletes that are under way. What is left, the janitor finds."""


class BlobEntry(NamedTuple):
    """An object of a list: its key, its bytes, and when it was written, by the bucket's clock."""

    key: str
    size: int
    modified_at: float


class Bucket:
    """`s3://bucket/prefix`. Keys are relative to the prefix. `options` are the access to it, as obstore names them."""

    def __init__(
        self, url: str, options: Mapping[str, str] | None = None, *, wait_s: float = WAIT_S, clock: Clock = REAL
    ) -> None:
        self.url, self._wait_s, self._clock = url, wait_s, clock
        try:
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ImportError:
            raise MissingExtra(f"The bucket {url}", "s3") from None
        parts = urlsplit(url)
        settings: Any = dict(options or {})
        endpoint = settings.get("endpoint", "")
        try:
            self._store: Any = S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                config=settings,
                client_options={
                    "connect_timeout": f"{CONNECT_S}s",
                    "timeout": f"{REQUEST_S}s",
                    "allow_http": endpoint.startswith("http://"),
                },
                # `_try` repeats, and says why.
                retry_config={"max_retries": 0, "retry_timeout": dt.timedelta(seconds=REQUEST_S)},
            )
        except (BaseError, ValueError, TypeError) as error:
            raise ConfigError(f"The bucket {url} cannot be used: {_first_line(error)}.") from None
        self._errors: type[Exception] = BaseError
        self._deletes: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self._deleter: threading.Thread | None = None

    def check(self) -> None:
        """Raise ConfigError if there is no such bucket, or if it cannot be written, read and deleted from.

        One that does not respond is only logged: what does not need it goes on, and it may come back.
        """
        key = f"tinkex-check-{uuid4().hex}"
        try:
            self.put(key, b"tinkex")
            self.get(key, hashlib.sha256(b"tinkex").hexdigest())
            self.delete([key])
        except FileNotFoundError:
            raise ConfigError(
                f"There is no bucket {self.url}. Create it, or correct --blobs or the endpoint."
            ) from None
        except DamagedBlob:
            raise ConfigError(f"The bucket {self.url} does not return what was written to it.") from None
        except BucketAway as error:
            if error.is_denied:
                raise ConfigError(
                    f"The bucket {self.url} rejects the credentials, or they may not write, read and delete there. "
                    "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and their rights."
                ) from None
            logger.warning("the bucket %s does not respond; saves and large calls wait for it", self.url)

    def put(self, key: str, content: bytes | Path) -> None:
        """Write an object: bytes, or a file, which is sent in pieces if it is large."""
        self._try(f"write {key}", lambda: self._store.put(key, content, chunk_size=PIECE_BYTES, max_concurrency=4))

    def get(self, key: str, sha256: str | None = None) -> bytes:
        """Return an object. Raises DamagedBlob if it has another checksum."""
        content = bytes(self._try(f"read {key}", lambda: self._store.get(key).bytes()))
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise DamagedBlob(f"The object {key} in the service's bucket is not what was written.")
        return content

    def get_range(self, key: str, first: int, size: int) -> bytes:
        """Return `size` bytes of an object from `first` on."""
        return bytes(self._try(f"read {key}", lambda: self._store.get_range(key, start=first, length=size)))

    def fetch(self, key: str, target: Path, size: int, sha256: str | None) -> None:
        """Write an object to a new file. Raises DamagedBlob, and leaves no file, if it is not what was written."""
        found = self._try(f"read {key}", lambda: self._store.head(key))["size"]
        digest = hashlib.sha256()
        try:
            with target.open("xb") as out:
                for first in range(0, size if found == size else 0, PIECE_BYTES):
                    piece = self.get_range(key, first, min(PIECE_BYTES, size - first))
                    digest.update(piece)
                    out.write(piece)
            if found != size or (sha256 is not None and digest.hexdigest() != sha256):
                raise DamagedBlob(
                    f"The object {key} in the service's bucket is not what was written: it has {found} bytes of "
                    f"{size}, or another checksum. Restore it from a backup or an older version of the bucket."
                )
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def copy(self, source: str, target: str) -> None:
        """Copy an object inside the bucket."""
        self._try(f"copy {source}", lambda: self._store.copy(source, target))

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        """Return the objects below a prefix, which is a folder's name. All of it again after an error."""
        return iter(self._try(f"list {prefix}", lambda: [*self._listed(prefix)]))

    def _listed(self, prefix: str) -> Iterator[BlobEntry]:
        for page in self._store.list(prefix):
            for row in page:
                yield BlobEntry(row["path"], row["size"], row["last_modified"].timestamp())

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. One that is gone already is not an error."""
        listed = list(keys)
        if listed:
            self._try(f"delete {listed[0]}", lambda: self._store.delete(listed))

    def delete_later(self, keys: Iterable[str]) -> None:
        """Delete objects on a thread of its own, or leave them to the janitor: no transaction waits for it."""
        listed = list(keys)
        if not listed:
            return
        if self._deleter is None:
            self._deleter = threading.Thread(target=self._delete_all, name="tinkex-deletes", daemon=True)
            self._deleter.start()
        self._deletes.put(listed)

    def _delete_all(self) -> None:
        while (keys := self._deletes.get()) is not None:
            try:
                self.delete(keys)
            except BucketAway as error:
                logger.warning("%d objects are left to the janitor: %s", len(keys), error)

    def close(self) -> None:
        if self._deleter is not None:
            self._deletes.put(None)
            self._deleter.join(CLOSE_S)

    def _try(self, what: str, call: Callable[[], T]) -> T:
        """Make a call again until it succeeds or its time is up. A put that is repeated writes the same bytes."""
        give_up_s, pause_s = self._clock.now() + self._wait_s, FIRST_PAUSE_S
        while True:
            try:
                return call()
            except FileNotFoundError:
                raise
            except self._errors as error:
                is_denied = type(error).__name__ in _DENIED
                reason = "rejects the service's credentials" if is_denied else "does not respond"
                if pause_s == FIRST_PAUSE_S:  # once for each call, however often it is repeated
                    logger.warning("the bucket %s %s; cannot %s: %s", self.url, reason, what, _first_line(error))
                if is_denied or self._clock.now() + pause_s >= give_up_s:
                    away = BucketAway(
                        f"The bucket that holds this service's files {reason}. Nothing is lost; try again."
                    )
                    away.is_denied = is_denied
                    raise away from None
            self._clock.pause(pause_s)
            pause_s = min(2 * pause_s, 2.0)


def _first_line(error: Exception) -> str:
    """Return what the log may show: obstore repeats the error below, with headers."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
