"""The threads for files and objects are for all tenants, however many requests of one want the same folder."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

from tinkex.server.upkeep.blob_calls import held
from tinkex.server.upkeep.database_thread import MOST_BESIDE, MOST_OF_TENANT, Db
from tinkex.store.blobs.data_folder import HeldFolder
from tinkex.store.blobs.folder_cache import FolderCache


class SlowFolders:
    """The cache of a bucket's folders, in front of a bucket that takes as long as the test says."""

    is_shared = True

    def __init__(self, root: Path) -> None:
        self.cache, self.fetched, self.may_come = FolderCache(root, 10**6), 0, threading.Event()

    def hold(self, folder: str) -> HeldFolder:
        return self.cache.hold(folder, self._fetch)

    def _fetch(self, target: Path) -> None:
        self.fetched += 1
        assert self.may_come.wait(20)
        (target / "weights").write_bytes(b"x")


class OnlyFolders:
    def __init__(self, folders: SlowFolders) -> None:
        self.folders = folders


def test_many_who_want_one_folder_keep_one_thread(tmp_path: Path) -> None:
    folders, db = SlowFolders(tmp_path / "cache"), Db()
    store = cast(Any, OnlyFolders(folders))

    async def read() -> bytes:
        async with held(db, store, "alice", "a") as path:
            return (path / "weights").read_bytes()

    async def run() -> None:
        readers = [asyncio.create_task(read()) for _ in range(4 * MOST_BESIDE)]
        try:
            await asyncio.sleep(0.05)
            assert await asyncio.wait_for(db.beside(len, b"another tenant"), 5) == 14
            readers[3].cancel()
        finally:
            folders.may_come.set()
        found = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 10)
        assert found.count(b"x") == len(readers) - 1 and folders.fetched == 1
        db.close()

    asyncio.run(run())


def test_slow_folders_of_one_tenant_leave_threads_to_another(tmp_path: Path) -> None:
    """Before: eight large adapters on their way from a bucket took all threads, and no other tenant's snapshot went."""
    folders, db = SlowFolders(tmp_path / "cache"), Db()
    store = cast(Any, OnlyFolders(folders))

    async def read(tenant: str, folder: str) -> bytes:
        async with held(db, store, tenant, folder) as path:
            return (path / "weights").read_bytes()

    async def until(count: int) -> None:
        while folders.fetched < count:
            await asyncio.sleep(0.001)

    async def run() -> None:
        readers = [asyncio.create_task(read("alice", f"a{number}")) for number in range(4 * MOST_BESIDE)]
        try:
            await asyncio.wait_for(until(MOST_OF_TENANT), 5)
            readers.append(asyncio.create_task(read("bob", "b")))
            await asyncio.wait_for(until(MOST_OF_TENANT + 1), 5)
            assert await asyncio.wait_for(db.beside(len, b"a third one"), 5) == 11
            readers[0].cancel()
        finally:
            folders.may_come.set()
        found = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 10)
        assert found.count(b"x") == len(readers) - 1
        db.close()

    asyncio.run(run())
