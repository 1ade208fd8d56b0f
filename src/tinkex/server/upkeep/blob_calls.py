"""What the store keeps beside its rows, for code on the event loop: folders that are in use, and large payloads.

In the data folder a path is all there is to it. With a bucket, a folder is fetched first and stays in the cache while
it is used, and payloads travel before and after the transaction, not on the database's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from tinkex.clock import Clock
from tinkex.engine.contract import EngineFault
from tinkex.server.upkeep.checksums import DamagedCheckpoint
from tinkex.server.upkeep.database_thread import Db
from tinkex.store.blobs.data_folder import HeldFolder
from tinkex.store.errors import BucketAway
from tinkex.store.journal import PayloadPart
from tinkex.store.payloads import MAX_INLINE_BYTES, StoredPayload
from tinkex.store.store import Store

T = TypeVar("T")

AWAY_S = 90.0
"""How long a sample waits for weights in a bucket that does not respond."""
RETRY_S = 1.0


@asynccontextmanager
async def held(
    db: Db, store: Store, tenant: str, folder: str | None, check: Callable[[Path], None] | None = None
) -> AsyncIterator[Path]:
    """Let the block read a folder at the path that it gets. Without a folder (a base model's) there is none to hold.

    `tenant` is whose work needs it, and waits if it fetches many.
    """
    if folder is None:
        yield Path()
        return
    holding = hold(db, store, tenant, folder) if check is None else hold_checked(db, store, tenant, folder, check)
    held_folder = await holding
    try:
        yield held_folder.path
    finally:
        held_folder.release()


async def hold(db: Db, store: Store, tenant: str, folder: str) -> HeldFolder:
    """Return a folder that can be read until the caller releases it. Raises FileNotFoundError if a bucket lacks it."""
    if not store.folders.is_shared:
        return store.folders.hold(folder)
    async with db.turn(folder):  # 64 samples of new weights would take all threads until those are fetched
        holding = asyncio.ensure_future(db.beside_for(tenant, store.folders.hold, folder))
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:
            holding.add_done_callback(_release)
            raise


async def while_held(
    db: Db, store: Store, clock: Clock, tenant: str, folder: str | None, work: Callable[[], Awaitable[T]]
) -> T:
    """Do work that reads a folder. A bucket that does not respond is asked again for `AWAY_S`."""
    if not store.folders.is_shared:
        return await work()
    give_up_s = clock.now() + AWAY_S
    while True:
        try:
            async with held(db, store, tenant, folder):
                return await work()
        except BucketAway as error:
            if clock.now() >= give_up_s:
                raise EngineFault(str(error), "server") from None
        await clock.sleep(RETRY_S)


async def hold_checked(db: Db, store: Store, tenant: str, folder: str, check: Callable[[Path], None]) -> HeldFolder:
    """Return a folder that `check` has read without error. A damaged copy of a bucket's folder is fetched again."""
    is_second = False
    while True:
        held_folder = await hold(db, store, tenant, folder)
        try:
            await asyncio.to_thread(check, held_folder.path)
            return held_folder
        except BaseException as error:
            held_folder.release()
            if is_second or not isinstance(error, DamagedCheckpoint) or not store.folders.forget(folder):
                raise
            is_second = True


async def keep(db: Db, store: Store, tenant: str, folder: str, files: Mapping[str, Any] | None = None) -> None:
    """Make a folder that the engine has written fit to be named by a row. In the data folder it is: no thread is woken,
    which takes milliseconds on a busy machine."""
    if store.folders.is_shared:
        await db.beside_for(tenant, store.folders.keep, folder, files)


async def payload(db: Db, store: Store, request_id: str, part: PayloadPart) -> bytes | None:
    """Return the bytes of an operation's command or result; None if there are none."""
    if not store.folders.is_shared:
        return await db(store.payload, request_id, part)
    stored = await db(store.find_payload, request_id, part)
    try:
        return None if stored is None else await db.beside(store.read_payload, stored)
    except FileNotFoundError:  # its row was deleted meanwhile
        return None


async def kept_payload(db: Db, store: Store, content: bytes) -> bytes | StoredPayload:
    """Return what to hand to the store with a row: the bytes, or where they were put if they are large."""
    if len(content) <= MAX_INLINE_BYTES or not store.folders.is_shared:
        return content
    return await db.beside(store.put_payload, content)


def _release(holding: asyncio.Future[HeldFolder]) -> None:
    if not holding.cancelled() and holding.exception() is None:
        holding.result().release()
