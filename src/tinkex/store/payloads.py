"""Stores bytes that are too large for a row in files, written before and deleted after the row that refers to them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAX_INLINE_BYTES = 64 * 1024
"""Up to this size bytes stay in their row: a second file would cost more than the longer row."""


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """Where bytes are stored: in the row, or in the file of this name."""

    content: bytes | None
    file: str | None


class Payloads:
    """The files in `journal/`, spread over 256 folders so that none gets too many entries."""

    def __init__(self, folder: Path, *, is_synced: bool) -> None:
        self._folder = folder
        self._is_synced = is_synced

    def write(self, content: bytes) -> StoredPayload:
        """Store the bytes. The caller removes the file again if its row is not written."""
        if len(content) <= MAX_INLINE_BYTES:
            return StoredPayload(content, None)
        name = uuid.uuid4().hex
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
                _sync_folder(target.parent)
                _sync_folder(self._folder)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            raise
        return StoredPayload(None, name)

    def read(self, payload: StoredPayload) -> bytes:
        if payload.file is None:
            return payload.content or b""
        return self._path(payload.file).read_bytes()

    def remove(self, names: Iterable[str | None]) -> None:
        """Remove files that no row refers to any more. A file that is gone already is not an error."""
        for name in names:
            if name is not None:
                self._path(name).unlink(missing_ok=True)

    def sweep(self, referenced: set[str]) -> int:
        """Remove every file that is not referenced, unfinished ones included, and return how many there were."""
        orphans = [path for path in self._folder.glob("??/*") if path.is_file() and path.name not in referenced]
        for path in orphans:
            path.unlink(missing_ok=True)
        return len(orphans)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # Windows keeps the name with the file and opens no folders.
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
