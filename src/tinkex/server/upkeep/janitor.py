"""Deletes what expired, what a session left behind and what a crash left on disk; and watches the free space.

An error in one of its steps is logged, and the other steps run all the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tinkex.server.service import Service
from tinkex.server.upkeep.adapter_files import INCOMING
from tinkex.server.upkeep.readiness import MIN_FREE_BYTES as MIN_FREE_BYTES
from tinkex.store.records import SamplerRecord
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

TICK_S = 30.0
MIN_ORPHAN_AGE_S = 3600.0
"""A folder that no row refers to may still be being written; not after an hour."""
MIN_ORPHAN_SEEN_S = 600.0
"""How long a folder must have been seen without a row, by a clock that does not jump. When the time of day jumps ahead,
the files of a save that is under way look old, and its row is not there yet."""
RUN_SAMPLERS = 32
"""The newest samplers of a run that stay, used or not, where there is a quota. A loop that makes one per step, and
samples a few steps behind, needs far fewer; one that makes them and never closes would fill any quota for good."""
SWEPT_FOLDERS = ("checkpoints", "journal/snapshots", INCOMING)
"""Folders that rows refer to, and uploads, are in these. Everything else in the data folder is left alone."""
BUCKET_EVERY_S = 3600.0
"""How often the bucket is looked through for what no row refers to."""
DISK_PAUSE = "disk"
"""The cause for which the worker is paused when the disk is full."""


class Janitor:
    """Runs the cleanup every 30 seconds.

    `free_bytes` returns the free space on a folder's disk; `started_at` is the time since which clients could connect.
    `leads`: whether this server cleans up what it shares with others, where several share a store.
    """

    def __init__(
        self,
        service: Service,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        started_at: float | None = None,
        leads: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._service, self._free_bytes, self._leads = service, free_bytes, leads
        self._started_at = service.clock.wall() if started_at is None else started_at
        self._orphans: dict[Path, float] = {}
        """Folder → when it was first seen without a row."""
        self._bucket_swept_at = -math.inf

    async def run(self) -> None:
        while True:
            await self.tick()
            await self._service.clock.sleep(TICK_S)

    async def tick(self) -> None:
        steps: tuple[Callable[[], Awaitable[None]], ...] = (
            self._clean_up_shared,
            self._evict_idle_runs,
            self._forget_idle_queues,
            self._drop_expired_samples,
            self._watch_disk,
            self._report_rejected_keys,
        )
        await self._run_steps(steps)

    async def _clean_up_shared(self) -> None:
        """Clean up what is in the store and its folders. Where several servers share them, one does it for all."""
        leads = self._leads is None or await self._leads()
        if leads:
            await self._run_steps(
                (
                    self._expire_checkpoints,
                    self._expire_results,
                    self._remove_ephemeral_samplers,
                    self._remove_surplus_samplers,
                    self._remove_orphaned_blobs,
                )
            )
        if leads or self._service.store.folders.is_shared:  # with a bucket, each has a data folder of its own
            await self._run_steps((self._remove_orphaned_folders,))

    @staticmethod
    async def _run_steps(steps: Sequence[Callable[[], Awaitable[None]]]) -> None:
        for step in steps:
            try:
                await step()
            except Exception as error:  # an edge: one bad row must not stop the cleanup
                logger.error("cleanup: %s failed", step.__name__.strip("_"), exc_info=error)

    async def _expire_checkpoints(self) -> None:
        service = self._service
        now = service.clock.wall()
        for saved in await service.db(service.store.expired_checkpoints, now):
            deleted = await service.db(lambda path: service.store.delete_checkpoint(path, expired_by=now), saved.path)
            if deleted is not None:
                await service.db.beside(service.store.folders.remove, deleted.folder)
                logger.info("%s expired", saved.path)

    async def _expire_results(self) -> None:
        service = self._service
        await service.db(service.store.expire_results, service.clock.wall() - service.config.result_ttl_s)

    async def _evict_idle_runs(self) -> None:
        """Evict the adapters of idle or finished sessions from the engine; they are restored when they are used."""
        service = self._service
        since = self._idle_since()
        for run_id in service.worker.resident():
            if await service.db(_is_idle, service.store, run_id, since) and await service.worker.evict(run_id):
                logger.info("%s is idle and was evicted from the engine", run_id)

    async def _forget_idle_queues(self) -> None:
        self._service.worker.forget_idle_queues()

    async def _drop_expired_samples(self) -> None:
        await self._service.sampling.drop_expired()

    async def _report_rejected_keys(self) -> None:
        self._service.access.rejected_keys.report()

    def _idle_since(self) -> float:
        """Return the time before which a session must have been seen last to count as idle.

        Right after a start that is never: while the service was down, no client could send a heartbeat.
        """
        since = self._service.clock.wall() - self._service.config.idle_session_s
        return since if since >= self._started_at else -math.inf

    async def _remove_ephemeral_samplers(self) -> None:
        service = self._service
        since = self._idle_since()
        for sampler in await service.db(_abandoned_samplers, service.store, since):
            await self._remove_sampler(sampler)

    async def _remove_surplus_samplers(self) -> None:
        """Remove old samplers that count in a quota and are not used. Their owner cannot delete them.

        Without a quota they stay as long as their session; so they do in a cluster, where other servers may be drawing
        from them.
        """
        service = self._service
        if not service.quotas.is_limited or service.config.is_clustered:
            return
        for sampler in await service.db(_surplus_samplers, service.store, self._idle_since()):
            if not service.sampling.is_used(sampler.id, service.config.idle_session_s):
                await self._remove_sampler(sampler)

    async def _remove_sampler(self, sampler: SamplerRecord) -> None:
        service = self._service
        await service.db(service.store.delete_sampler, sampler.id)
        # Two samplers of one replaced checkpoint share its files.
        if sampler.folder is not None and sampler.folder not in await service.db(service.store.all_folders):
            await service.db.beside(service.store.folders.remove, sampler.folder)

    async def _remove_orphaned_folders(self) -> None:
        service = self._service
        data_dir = service.config.data_dir
        before = service.clock.wall() - MIN_ORPHAN_AGE_S
        names = await service.db(service.store.all_folders)
        referenced = {service.store.folders.resolve(name) for name in names}
        roots = [data_dir.resolve() / root for root in SWEPT_FOLDERS]
        orphans = await asyncio.to_thread(unreferenced_folders, roots, referenced, before)
        now = service.clock.now()
        self._orphans = {folder: self._orphans.get(folder, now) for folder in orphans}
        for folder, seen_at in self._orphans.items():
            if now - seen_at < MIN_ORPHAN_SEEN_S:
                continue
            if await service.db.beside(service.store.folders.remove_local, str(folder.relative_to(data_dir.resolve()))):
                logger.info("deleted a folder that no record refers to: %s", folder.name)

    async def _remove_orphaned_blobs(self) -> None:
        """Delete what crashes have left in the bucket, once an hour: it lists everything that is there."""
        service, now = self._service, self._service.clock.now()
        if not service.store.folders.is_shared or now - self._bucket_swept_at < BUCKET_EVERY_S:
            return
        self._bucket_swept_at = now
        referenced = await service.db(service.store.referenced)
        before = service.clock.wall() - MIN_ORPHAN_AGE_S
        freed = await service.db.beside(service.store.remove_orphans, referenced, before)
        if freed.folders or freed.files:
            logger.info(
                "deleted %d folders and %d payloads of the bucket without a record", len(freed.folders), freed.files
            )

    async def _watch_disk(self) -> None:
        """Pause training before the disk is full, and resume it when there is space again.

        A tenant above its quota pauses nothing: `limits.quotas` rejects what it wants to store.
        """
        service = self._service
        free = await asyncio.to_thread(self._free_bytes, service.config.data_dir)
        if free < MIN_FREE_BYTES:
            reason = f"the service's disk has {free / 1e6:.0f} MB left, below {MIN_FREE_BYTES / 1e6:.0f} MB"
            service.worker.pause(DISK_PAUSE, f"{reason}; delete checkpoints or run `tinkex gc`, and training resumes")
        else:
            service.worker.unpause(DISK_PAUSE)
        await service.db(service.store.keep_reserve)


def _is_idle(store: Store, run_id: str, since: float) -> bool:
    run = store.get_run(run_id)
    return run is not None and _is_over(store, run.session_id, run.last_request_at, since)


def _abandoned_samplers(store: Store, since: float) -> list[SamplerRecord]:
    """Return the samplers with their own files whose session is over."""
    samplers = store.samplers_with_files()
    return [row for row in samplers if _is_over(store, row.session_id, row.created_at, since)]


def _surplus_samplers(store: Store, since: float) -> list[SamplerRecord]:
    """Return the samplers with their own files, made before `since`, of which their run has enough newer ones."""
    by_run: dict[str, list[SamplerRecord]] = {}
    for row in store.samplers_with_files():
        by_run.setdefault(str(row.folder).split("/")[1], []).append(row)  # checkpoints/{run}/{kind}/{name}
    return [row for rows in by_run.values() for row in rows[:-RUN_SAMPLERS] if row.created_at < since]


def _is_over(store: Store, session_id: str, used_at: float, since: float) -> bool:
    """Whether a session is finished or idle. A client without heartbeats counts as alive by its requests."""
    session = store.get_session(session_id)
    return session is None or session.finished is not None or max(session.seen_at, used_at) < since


def unreferenced_folders(roots: list[Path], referenced: set[Path], before: float) -> list[Path]:
    """Return the topmost folders that are not referenced, contain no referenced one, and were not changed lately."""
    above = {parent for folder in referenced for parent in folder.parents}
    unreferenced = []
    for root in roots:
        for path, names, _ in os.walk(root):
            folders_here = [Path(path, name) for name in names]
            unreferenced += [folder for folder in folders_here if folder not in referenced and folder not in above]
            names[:] = [folder.name for folder in folders_here if folder in above and folder not in referenced]
    return [folder for folder in unreferenced if _newest(folder) < before]


def _newest(folder: Path) -> float:
    try:
        return max(entry.stat().st_mtime for entry in (folder, *folder.rglob("*")))
    except FileNotFoundError:  # it is being deleted right now
        return float("inf")
