"""Copies of folders on this machine: bounded, held while they are in use, the least recently used ones leave.

It knows folders and bytes, no bucket: what is missing, the caller fetches.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from tinkex.store.blobs.data_folder import HeldFolder

logger = logging.getLogger("tinkex.store")

_FETCHED = "fetched"
_PART = ".part-"


@dataclass(slots=True)
class CachedCopy:
    """A complete folder on this machine."""

    nbytes: int
    holders: int = 0


class FolderCache:
    """Keeps folders below `root`, whose names come from their keys: a key has the same path every time.

    Each entry is complete: it is made under another name and renamed. What an earlier process left is deleted at the
    start: a power cut may have torn it, and to compare its checksums takes as long as fetching it from a bucket nearby.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root, self._limit_bytes = root, limit_bytes
        self._copies: dict[str, CachedCopy] = {}
        """By key, the least recently used first."""
        self._fetching: set[str] = set()
        self._changed = threading.Condition()
        shutil.rmtree(root, ignore_errors=True)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    def path(self, key: str) -> Path:
        """Return where a key's folder is, or will be."""
        return self._root / _FETCHED / hashlib.sha256(key.encode()).hexdigest()[:32]

    def hold(self, key: str, fetch: Callable[[Path], None]) -> HeldFolder:
        """Return a key's folder, held. `fetch` writes it to the path that it gets; others who want it wait for it."""
        with self._changed:
            while key in self._fetching:
                self._changed.wait()  # `fetch` has deadlines of its own
            if (copy := self._touch(key)) is not None:
                copy.holders += 1
                return HeldFolder(self.path(key), lambda: self._release(key))
            self._fetching.add(key)
        try:
            part = self._root / _FETCHED / f"{_PART}{uuid4().hex}"
            try:
                part.mkdir(parents=True, mode=0o700)
                fetch(part)
                return self._add(key, part)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
        finally:
            with self._changed:
                self._fetching.discard(key)
                self._changed.notify_all()

    def adopt(self, key: str) -> None:
        """Count a folder that was written to its path: it was sent away, and somebody may want to read it soon."""
        self._add(key, None).release()

    def drop(self, key: str) -> None:
        """Delete a key's copy unless it is in use."""
        with self._changed:
            if (copy := self._copies.get(key)) is None or copy.holders:
                return
            del self._copies[key]
            shutil.rmtree(self.path(key), ignore_errors=True)

    def _add(self, key: str, part: Path | None) -> HeldFolder:
        path = self.path(key)
        with self._changed:
            if part is not None:
                shutil.rmtree(path, ignore_errors=True)
                part.replace(path)
            self._copies[key] = CachedCopy(sum(file.stat().st_size for file in path.iterdir()), holders=1)
            self._make_room()
        return HeldFolder(path, lambda: self._release(key))

    def _release(self, key: str) -> None:
        with self._changed:
            self._copies[key].holders -= 1
            self._make_room()

    def _touch(self, key: str) -> CachedCopy | None:
        if (copy := self._copies.pop(key, None)) is not None:
            self._copies[key] = copy
        return copy

    def _make_room(self) -> None:
        """Delete copies that nobody reads until the rest fits. What is in use stays, even above the limit: it must be
        somewhere to be read."""
        excess = self.nbytes - self._limit_bytes
        for key, copy in list(self._copies.items()):
            if excess <= 0:
                break
            if not copy.holders:
                excess -= copy.nbytes
                del self._copies[key]
                shutil.rmtree(self.path(key), ignore_errors=True)
