"""`download_checkpoint`: fetches the files of a saved checkpoint, whatever way the service hands them out.

Services up to 0.35 give a tar archive; later ones give the address of each file, after a temporary export. `download`
fetches one file (see `_files/fetch.py`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tinkex.client._files.archive import safe_path, unpack
from tinkex.client._files.fetch import DownloadPart, DownloadProgress, Watcher, download
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.loop import in_thread
from tinkex.client._runtime.operation import Operation
from tinkex.client.future import APIFuture
from tinkex.client.rest import RestClient
from tinkex.client.service import ServiceClient
from tinkex.errors import APIStatusError, NotFoundError, TinkexError
from tinkex.types import ParsedCheckpointTinkerPath

__all__ = ["Progress", "download", "download_checkpoint"]

Progress = DownloadProgress
"""How much of a file has been fetched: `file`, `done_bytes`, and `total_bytes` (None if the service does not say)."""

LONGEST_S = 7 * 86400.0
"""A download that moves may take as long as it takes; one that does not move fails much sooner."""
EXPORT_TTL_S = 86400
"""A temporary export that could not be deleted (the process was killed) goes away by itself."""
_NO_SUCH_CALL = (404, 405, 410, 501)
_ADDRESS_EXPIRED = (400, 401, 403)


def download_checkpoint(
    rest_client: RestClient,
    tinker_path: str,
    folder: str | os.PathLike[str],
    progress: Watcher | None = None,
    *,
    keep_archive: bool = False,
) -> APIFuture[list[Path]]:
    """Fetch all files of a checkpoint into `folder`; returns their paths.

    Called again after a break it goes on where it stopped. `progress` is called with a `Progress` on the SDK's loop
    thread: it must be quick. A service that gives no archives starts a training session for the export of a
    `weights/` path; the export is deleted afterwards.
    """
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    link = rest_client._session.link()
    operation = DownloadOperation("download_checkpoint", link.clock.now(), session=rest_client._session)

    def watch(step: DownloadProgress) -> None:
        operation.latest = step
        if progress is not None:
            progress(step)

    job = CheckpointDownload(rest_client, link, parsed, Path(folder), watch, keep_archive)
    return link.run(operation, job.run, LONGEST_S)


@dataclass(eq=False)
class DownloadOperation(Operation):
    """Says in its waiting line how far it has come."""

    latest: DownloadProgress | None = None

    def waiting_line(self, now: float) -> str:
        step = self.latest
        if step is None:
            return super().waiting_line(now)
        of = "" if step.total_bytes is None else f" of {step.total_bytes:,}"
        return f"waiting {now - self.created_at:.0f} s for {self.name}: {step.file}, {step.done_bytes:,}{of} bytes"


@dataclass(eq=False)
class CheckpointDownload:
    """One download. Loop thread."""

    _rest: RestClient
    _link: ServiceLink
    _parsed: ParsedCheckpointTinkerPath
    _folder: Path
    _watch: Watcher
    _keep_archive: bool

    async def run(self) -> list[Path]:
        if self._parsed.checkpoint_type == "external":
            return await self._files(self._parsed.tinker_path)
        try:
            url = await self._archive_url()
        except APIStatusError as error:
            if error.status_code not in _NO_SUCH_CALL or not await self._may_exist():
                raise
            return await self._export()
        return await self._archive(url)

    async def _archive_url(self) -> str:
        archive = await self._rest.get_checkpoint_archive_url(self._parsed.training_run_id, self._parsed.checkpoint_id)
        return archive.url

    async def _archive(self, url: str) -> list[Path]:
        name = re.sub(r"[^\w.-]+", "_", self._parsed.checkpoint_id)
        archive = await self._fetch(url, self._archive_url, self._folder / f"{name}.tar")
        files = await in_thread(lambda: unpack(archive, self._folder), "tinkex-unpack")
        if self._keep_archive:
            return [*files, archive]
        archive.unlink(missing_ok=True)
        return files

    async def _files(self, tinker_path: str) -> list[Path]:
        """The files of an export, one after the other."""

        async def links() -> dict[str, str]:
            return (await self._rest.get_external_weights_urls(tinker_path)).urls

        async def renewed(file: str) -> str:
            if (url := (await links()).get(file)) is None:
                raise TinkexError(f"The service no longer has {file!r} of {tinker_path}. Start the download again.")
            return url

        urls = await links()
        targets = {file: safe_path(self._folder, file) for file in sorted(urls)}  # all names are checked first
        for file, target in targets.items():
            await self._fetch(urls[file], functools.partial(renewed, file), target)
        return list(targets.values())

    async def _fetch(self, url: str, renew: Callable[[], Awaitable[str]], target: Path) -> Path:
        """One file. An address that expires on the way is asked for again, as long as the file grows."""
        bytes_before = -1
        while True:
            try:
                return await download(self._link, url, target, progress=self._watch)
            except APIStatusError as error:
                if error.status_code not in _ADDRESS_EXPIRED or DownloadPart(target).size_bytes <= bytes_before:
                    raise
                bytes_before = DownloadPart(target).size_bytes
                url = await renew()

    async def _may_exist(self) -> bool:
        """Return whether to go on although there was no archive: the call may be missing, or the checkpoint."""
        try:
            listed = await self._rest.list_checkpoints(self._parsed.training_run_id)
        except APIStatusError as error:
            # Others' checkpoints cannot be listed, published ones still be read.
            return not isinstance(error, NotFoundError)
        return any(saved.tinker_path == self._parsed.tinker_path for saved in listed.checkpoints)

    async def _export(self) -> list[Path]:
        """Have the service write the files: load the weights into a new run, export it, fetch, delete the export."""
        path = self._parsed.tinker_path
        if self._parsed.checkpoint_type != "training":
            raise TinkexError(
                f"This service gives no archives, and {path} cannot be exported: only weights/ paths (from save_state) "
                "and external_weights/ paths (from save_weights_external) can be downloaded."
            )
        service = ServiceClient(config=self._rest._session.config)
        try:
            training = await service.create_training_client_from_state_async(path)
            export = await training.save_weights_external(f"download-{uuid.uuid4().hex[:12]}", EXPORT_TTL_S)
            temporary = TemporaryExport(self._rest, self._link, export.path)
            try:
                return await self._files(export.path)
            finally:
                await temporary.delete()
        finally:
            try:
                await service.close()
            except TinkexError:
                pass  # the files are here, or their own error is on its way


class TemporaryExport:
    """Deletes a temporary export, also when Ctrl-C ends the interpreter in the middle of the download."""

    def __init__(self, rest: RestClient, link: ServiceLink, export_path: str) -> None:
        self._rest = rest
        self._loop = link.loop
        self._export_path = export_path
        self._task: asyncio.Task[None] | None = None
        self._loop.at_exit(id(self), self.delete)

    async def delete(self) -> None:
        """Delete it once; a second caller waits for the same deletion."""
        if self._task is None:
            self._task = self._loop.spawn(self._delete())
        await asyncio.shield(self._task)

    async def _delete(self) -> None:
        try:
            await self._rest.delete_checkpoint_from_tinker_path(self._export_path)
        except TinkexError:
            pass  # it expires by itself
        finally:
            self._loop.at_exit(id(self), None)
