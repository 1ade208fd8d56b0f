"""The folders that rows refer to, in a bucket: a set of objects under one prefix, and a list of them, written last.

The engine reads and writes paths of this machine only. A new folder is written to the cache, sent to the bucket file by
file, and only then named by a row; one that is read is fetched into the cache first. The list has the size and the
checksum of every file: what is fetched is compared with it.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from tinkex.errors import TinkexError
from tinkex.store.blobs.bucket import PIECE_BYTES, Bucket
from tinkex.store.blobs.data_folder import DataFolder, HeldFolder
from tinkex.store.blobs.folder_cache import FolderCache
from tinkex.store.errors import DamagedBlob

logger = logging.getLogger("tinkex.store")

CACHE = "bucket-cache"
"""The folder below the data folder that holds copies. It may be deleted while no server runs."""
FILE_LIST = "tinkex-files.json"
"""The list of a folder's files in the bucket: name → size_bytes and sha256."""
FOLDER_ROOTS = ("checkpoints", "journal/snapshots")
Files = Mapping[str, Mapping[str, Any]]


class BucketFolders(DataFolder):
    """Folders in a bucket. Those that the data folder has from before there was a bucket are read there."""

    is_shared = True

    def __init__(self, root: Path, bucket: Bucket, cache_bytes: int) -> None:
        super().__init__(root)
        self.bucket, self._cache_bytes = bucket, cache_bytes
        self._made: FolderCache | None = None

    @property
    def cache(self) -> FolderCache:
        """The copies on this machine. Made when the first is needed: commands beside a server have none."""
        if self._made is None:
            self._made = FolderCache(self.root / CACHE, self._cache_bytes)
        return self._made

    def path(self, folder: str) -> Path:
        return self._own(folder) or self.cache.path(folder)

    def new(self, run_id: str, kind: str, name: str) -> str:
        """Return a name that no other server takes: nobody asks the bucket whether it is free."""
        folder = f"checkpoints/{run_id}/{kind}/{name}.{uuid4().hex[:8]}"
        self.resolve(folder)
        return folder

    def keep(self, folder: str, files: Files | None = None) -> None:
        """Send a folder to the bucket, its list last. An error leaves objects that no row names, for the janitor."""
        path = self.cache.path(folder)
        try:
            self._send(path, folder, files)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        self.cache.adopt(folder)

    def move_in(self, staged: Path, folder: str, files: Files) -> None:
        self._send(staged, folder, files)

    def hold(self, folder: str) -> HeldFolder:
        """Return a folder on this machine, fetched if it is not there. FileNotFoundError if the bucket has none."""
        own = self._own(folder)
        return HeldFolder(own) if own is not None else self.cache.hold(folder, lambda path: self.fetch(folder, path))

    def forget(self, folder: str) -> bool:
        self.cache.drop(folder)
        return self._own(folder) is None

    def fetch(self, folder: str, target: Path) -> None:
        """Write a folder's files into an empty folder of this machine. Raises DamagedBlob if one is not as listed."""
        for name, about in self.files(folder).items():
            self.bucket.fetch(f"{folder}/{name}", target / name, about["size_bytes"], about.get("sha256"))

    def files(self, folder: str) -> Files:
        """Return the list of a folder's files. One that was copied into the bucket by hand has sizes only."""
        try:
            content = self.bucket.get(f"{folder}/{FILE_LIST}")
        except FileNotFoundError:
            found = {row.key.rpartition("/")[2]: {"size_bytes": row.size} for row in self.bucket.list(folder)}
            if not found:
                raise
            return found
        try:
            files: Files = orjson.loads(content)["files"]
            return {
                Path(name).name: {key: about[key] for key in ("size_bytes", "sha256")} for name, about in files.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedBlob(f"The list of files of {folder} in the service's bucket is damaged.") from None

    def copy(self, source: str, target: str, files: Files) -> None:
        """Copy files inside the bucket. Those of the data folder are sent there."""
        if (own := self._own(source)) is not None:
            self._send(own, target, files)
            return
        for name in files:
            self.bucket.copy(f"{source}/{name}", f"{target}/{name}")
        self._put_list(target, files)

    def remove(self, folder: str) -> bool:
        """Delete a folder. One that is left, or half deleted, has no row: the janitor finds it."""
        if self._made is not None:
            self._made.drop(folder)
        try:
            if self._own(folder) is not None:
                return self.remove_local(folder)
            keys = [row.key for row in self.bucket.list(folder)]
            self.bucket.delete(keys)
        except TinkexError as error:
            logger.warning("%s is left to the janitor: %s", folder, error)
            return False
        return bool(keys)

    def orphans(self, referenced: set[str], before: float) -> dict[str, int]:
        """Return the folders of the bucket that no row names and that were not written lately, with their bytes."""
        sizes: dict[str, int] = {}
        newest: dict[str, float] = {}
        for root in FOLDER_ROOTS:
            for row in self.bucket.list(root):
                folder = row.key.rpartition("/")[0]
                sizes[folder] = sizes.get(folder, 0) + row.size
                newest[folder] = max(newest.get(folder, 0.0), row.modified_at)
        return {folder: size for folder, size in sizes.items() if folder not in referenced and newest[folder] < before}

    def _own(self, folder: str) -> Path | None:
        """Return a folder of the data folder, from before the service had a bucket."""
        path = self.resolve(folder)
        return path if path.is_dir() else None

    def _send(self, path: Path, folder: str, files: Files | None) -> None:
        about = files or {file.name: _about(file) for file in sorted(path.iterdir())}
        for name in about:
            file = path / name
            self.bucket.put(f"{folder}/{name}", file if file.stat().st_size > PIECE_BYTES else file.read_bytes())
        self._put_list(folder, about)

    def _put_list(self, folder: str, files: Files) -> None:
        self.bucket.put(f"{folder}/{FILE_LIST}", orjson.dumps({"files": files}))


def _about(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {
            "size_bytes": file.stat().st_size,
            "sha256": hashlib.file_digest(content, "sha256").hexdigest(),
        }
