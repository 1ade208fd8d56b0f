"""Tidies up: what expired, what a session left behind, what a crash left on the disk; and watches the disk.

Whatever goes wrong in one of its steps is logged, and the others are done all the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from tinkex.server.service import Service
from tinkex.server.upkeep import folders
from tinkex.server.upkeep.adapter_files import INCOMING
from tinkex.store.records import SamplerRecord, SessionRecord
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

TICK_S = 30.0
MIN_ORPHAN_AGE_S = 3600.0
"""A folder that no row names may still be in the making; not after an hour."""
MIN_FREE_BYTES = 200_000_000
SWEPT_FOLDERS = ("checkpoints", "journal/snapshots", INCOMING)
"""Where folders lie that rows name, and uploads. Everything else in the data folder is left alone."""
DISK_PAUSE = "disk"
"""The cause under which the worker is paused."""


class Janitor:
    """`free_bytes` says how much room a folder's disk has; `started_at` since when clients can be heard."""

    def __init__(
        self,
        service: Service,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        started_at: float | None = None,
    ) -> None:
        self._service, self._free_bytes = service, free_bytes
        self._started_at = service.clock.wall() if started_at is None else started_at

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.tick()
            await self._service.clock.sleep(TICK_S)

    async def tick(self) -> None:
        steps: tuple[Callable[[], Awaitable[None]], ...] = (
            self._expire_checkpoints,
            self._expire_results,
            self._evict_idle_runs,
            self._remove_ephemeral_samplers,
            self._remove_rubbish,
            self._watch_disk,
        )
        for step in steps:
            try:
                await step()
            except Exception as problem:  # an edge: a service must not stop tidying because of one bad row
                logger.error("tidying: %s failed", step.__name__.strip("_"), exc_info=problem)

    async def _expire_checkpoints(self) -> None:
        service = self._service
        now = service.clock.wall()
        for saved in await service.db(service.store.expired_checkpoints, now):
            gone = await service.db(lambda path: service.store.delete_checkpoint(path, expired_by=now), saved.path)
            if gone is not None:
                await asyncio.to_thread(folders.remove, service.config.data_dir, gone.folder)
                logger.info("%s expired", saved.path)

    async def _expire_results(self) -> None:
        service = self._service
        await service.db(service.store.expire_results, service.clock.wall() - service.config.result_ttl_s)

    async def _evict_idle_runs(self) -> None:
        """Adapters of sessions that ended or fell silent leave the engine; they come back when they are used."""
        service = self._service
        since = self._silent_since()
        for run_id in service.worker.resident():
            if await service.db(_is_idle, service.store, run_id, since) and await service.worker.evict(run_id):
                logger.info("%s is idle and left the engine", run_id)

    def _silent_since(self) -> float:
        """Who was not heard of since then is gone. While the service was down, nobody could be heard."""
        since = self._service.clock.wall() - self._service.config.idle_session_s
        return since if since >= self._started_at else -math.inf

    async def _remove_ephemeral_samplers(self) -> None:
        service = self._service
        since = self._silent_since()
        for sampler in await service.db(_left_behind, service.store, since):
            await service.db(service.store.delete_sampler, sampler.id)
            # Two samplers of one replaced checkpoint share its files.
            if sampler.folder is not None and sampler.folder not in await service.db(service.store.all_folders):
                await asyncio.to_thread(folders.remove, service.config.data_dir, sampler.folder)

    async def _remove_rubbish(self) -> None:
        service = self._service
        data_dir = service.config.data_dir
        old = service.clock.wall() - MIN_ORPHAN_AGE_S
        named = {folders.resolve_inside(data_dir, folder) for folder in await service.db(service.store.all_folders)}
        for folder in await asyncio.to_thread(
            unreferenced_folders, [data_dir.resolve() / root for root in SWEPT_FOLDERS], named, old
        ):
            if await asyncio.to_thread(folders.remove, data_dir, str(folder.relative_to(data_dir.resolve()))):
                logger.info("removed a folder that nothing refers to: %s", folder.name)

    async def _watch_disk(self) -> None:
        """A full disk stops training before anything is lost; it goes on by itself when there is room."""
        config, worker = self._service.config, self._service.worker
        free = await asyncio.to_thread(self._free_bytes, config.data_dir)
        reason = ""
        if free < MIN_FREE_BYTES:
            reason = f"the service's disk has {free / 1e6:.0f} MB left, below {MIN_FREE_BYTES / 1e6:.0f} MB"
        elif config.quota_gb is not None:
            used = await asyncio.to_thread(_size, config.data_dir)
            if used > config.quota_gb * 1e9:
                reason = f"the service's data take {used / 1e9:.2f} GB, above its quota of {config.quota_gb:g} GB"
        if reason:
            worker.pause(DISK_PAUSE, f"{reason}; delete checkpoints or run `tinkex gc`, and it goes on")
        else:
            worker.unpause(DISK_PAUSE)


def _is_idle(store: Store, run_id: str, since: float) -> bool:
    run = store.get_run(run_id)
    if run is None:
        return False
    session = store.get_session(run.session_id)
    # A client that sends no heartbeats shows by its requests that it is there.
    return _is_over(session, since) and (run.last_request_at < since or _is_finished(session))


def _left_behind(store: Store, since: float) -> list[SamplerRecord]:
    """Samplers with files of their own whose session is over."""
    found = []
    for sampler in store.samplers_with_files():
        session = store.get_session(sampler.session_id)
        if _is_over(session, since) and (sampler.created_at < since or _is_finished(session)):
            found.append(sampler)
    return found


def _is_finished(session: SessionRecord | None) -> bool:
    return session is None or session.finished is not None


def _is_over(session: SessionRecord | None, since: float) -> bool:
    return session is None or session.finished is not None or session.seen_at < since


def unreferenced_folders(roots: list[Path], named: set[Path], old: float) -> list[Path]:
    """The topmost folders that neither are named nor hold a named one, and that nobody has touched of late."""
    above = {parent for folder in named for parent in folder.parents}
    found = []
    for root in roots:
        for place, below, _ in os.walk(root):
            inner = [Path(place, name) for name in below]
            found += [folder for folder in inner if folder not in named and folder not in above]
            below[:] = [folder.name for folder in inner if folder in above and folder not in named]
    return [folder for folder in found if _newest(folder) < old]


def _newest(folder: Path) -> float:
    try:
        return max(entry.stat().st_mtime for entry in (folder, *folder.rglob("*")))
    except FileNotFoundError:  # it is going as we look
        return float("inf")


def _size(folder: Path) -> int:
    """Bytes of all files; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.stat(os.path.join(place, name), follow_symlinks=False)
            except OSError:  # gone meanwhile
                continue
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())
