"""Stores bytes that are too large for a row in files, written before and deleted after the row that refers to them.

The files lie in the data folder or in a bucket. In a bucket their names hold their size and checksum: what is read is
compared with them, and nobody has to ask the bucket how large a payload is.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tinkex.store.blobs.bucket import Bucket
from tinkex.store.disk import sync

MAX_INLINE_BYTES = 64 * 1024
"""Up to this size bytes stay in their row: a second file would cost more than the longer row."""


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """Where bytes are stored: in the row, or in the file of this name."""

    content: bytes | None
    file: str | None


class Payloads:
    """The files in `journal/`, spread over 256 folders so that none gets too many entries."""

    def __init__(self, folder: Path, *, is_synced: bool, bucket: Bucket | None = None) -> None:
        self._folder = folder
        self._is_synced = is_synced
        self._bucket = bucket

    def write(self, content: bytes) -> StoredPayload:
        """Store the bytes. The caller removes the file again if its row is not written."""
        if len(content) <= MAX_INLINE_BYTES:
            return StoredPayload(content, None)
        name = uuid.uuid4().hex
        if self._bucket is not None:
            name = f"{name}-{len(content)}-{hashlib.sha256(content).hexdigest()}"
            self._bucket.put(key_of(name), content)
            return StoredPayload(None, name)
        target = self._path(name)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = target.with_suffix(".part")
        try:
            with open(unfinished, "xb", buffering=0) as out:
                _write_all(out.fileno(), content)
                if self._is_synced:
                    os.fsync(out.fileno())
            os.replace(unfinished, target)
            if self._is_synced:
                # The file's name, its folder's and that of the journal: any of them may be new.
                for folder in (target.parent, self._folder, self._folder.parent):
                    sync(folder)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            raise
        return StoredPayload(None, name)

    def read(self, payload: StoredPayload) -> bytes:
        if payload.file is None:
            return payload.content or b""
        if self._bucket is not None and (parts := in_bucket(payload.file)) is not None:
            return self._bucket.get(key_of(payload.file), parts[1])
        return self._path(payload.file).read_bytes()

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 if it is gone."""
        if (parts := in_bucket(name)) is not None:
            return parts[0]
        try:
            return self._path(name).stat().st_size
        except FileNotFoundError:
            return 0

    def remove(self, names: Iterable[str | None]) -> None:
        """Remove files that no row refers to any more. A file that is gone already is not an error."""
        remote = []
        for name in names:
            if name is not None and self._bucket is not None and in_bucket(name) is not None:
                remote.append(key_of(name))
            elif name is not None:
                self._path(name).unlink(missing_ok=True)
        if self._bucket is not None:
            self._bucket.delete_later(remote)

    def sweep(self, referenced: set[str]) -> int:
        """Remove every file that is not referenced, unfinished ones included, and return how many there were."""
        orphans = [path for path in self._folder.glob("??/*") if path.is_file() and path.name not in referenced]
        for path in orphans:
            path.unlink(missing_ok=True)
        return len(orphans)

    def orphans(self, referenced: set[str], before: float) -> list[str]:
        """Return the keys of a bucket's payloads that are not referenced and were not written lately."""
        rows = [] if self._bucket is None else self._bucket.list("journal")
        return [
            row.key
            for row in rows
            if in_bucket(name := row.key.rpartition("/")[2]) and name not in referenced and row.modified_at < before
        ]

    def close(self) -> None:
        if self._bucket is not None:
            self._bucket.close()

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name


def key_of(name: str) -> str:
    """Return the key of a payload: where it lies below the data folder, or below a bucket's prefix."""
    return f"journal/{name[:2]}/{name}"


def in_bucket(name: str) -> tuple[int, str] | None:
    """Return the size and the checksum of a payload that was put into a bucket; None for a file of the data folder."""
    parts = name.split("-")
    return (int(parts[1]), parts[2]) if len(parts) == 3 and parts[1].isdigit() else None


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
