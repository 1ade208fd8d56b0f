"""The folders that rows refer to, in the data folder. A path outside of it is an error, whatever a row says."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from tinkex.errors import TinkexError
from tinkex.store.disk import sync

logger = logging.getLogger("tinkex.store")

EPHEMERAL = "ephemeral"
"""checkpoints/{run}/ephemeral/{number}: the weights of samplers without a name."""


class HeldFolder:
    """A folder on this machine that stays there until it is released, once."""

    def __init__(self, path: Path, on_release: Callable[[], None] | None = None) -> None:
        self.path, self._on_release = path, on_release

    def release(self) -> None:
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.release()


class DataFolder:
    """Folders by name, relative to the data folder. They are complete before a row names them, and never change."""

    is_shared = False
    """Whether other machines can read what is kept: then keeping, holding and removing may take long."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, folder: str) -> Path:
        """Return where a folder is on this machine while it is held, and where a new one is to be written."""
        return self.root / folder

    def resolve(self, folder: str) -> Path:
        """Return the absolute path of a folder that a row names. Raises if it is outside the data folder."""
        root = self.root.resolve()
        path = (root / folder).resolve()
        if path == root or not path.is_relative_to(root):
            raise TinkexError(f"The folder {folder!r} of a record lies outside the data folder; it is left alone.")
        return path

    def new(self, run_id: str, kind: str, name: str) -> str:
        """Return an unused name for a checkpoint's folder, and create the folder above it."""
        folder = f"checkpoints/{run_id}/{kind}/{name}"
        if (self.root / folder).exists():
            folder = f"{folder}.{uuid4().hex[:8]}"
        self.resolve(folder).parent.mkdir(parents=True, exist_ok=True)
        return folder

    def keep(self, folder: str, files: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Make a folder that the engine has written to `path` fit to be named by a row: here it is already.

        `files` are sizes and checksums, where they are known.
        """

    def hold(self, folder: str) -> HeldFolder:
        """Return a folder that can be read until it is released."""
        return HeldFolder(self.resolve(folder))

    def fetch(self, folder: str, target: Path) -> None:
        """Copy a folder's files into an empty folder of this machine."""
        shutil.copytree(self.resolve(folder), target, dirs_exist_ok=True)

    def forget(self, folder: str) -> bool:
        """Forget a copy on this machine that is damaged. Returns whether there is another one to read."""
        return False

    def copy(self, source: str, target: str, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy files to a temporary name and rename it, so that the folder is complete or does not exist."""
        origin, copied = self.resolve(source), self.resolve(target)
        part = copied.with_name(f"{copied.name}.part-{uuid4().hex[:8]}")
        try:
            part.mkdir(parents=True)
            for name in files:
                link_or_copy(origin / name, part / name)
            part.replace(copied)
            self._sync(target)
        except BaseException:
            for path in (part, copied):
                self.remove(str(path.relative_to(self.root.resolve())))
            raise

    def move_in(self, staged: Path, folder: str, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Move files of this machine to their folder, and bring them to the disk before a row refers to them."""
        try:
            staged.replace(self.resolve(folder))
            self._sync(folder)
        except BaseException:
            self.remove(folder)
            raise

    def remove(self, folder: str) -> bool:
        """Delete a folder, and its parents if they are empty. The janitor retries one that cannot be deleted."""
        return self.remove_local(folder)

    def remove_local(self, folder: str) -> bool:
        """Delete a folder of this machine."""
        try:
            target = self.resolve(folder)
            shutil.rmtree(target)
            is_removed = True
        except FileNotFoundError:
            is_removed = False
        except (OSError, TinkexError) as error:
            logger.warning("a folder could not be deleted: %s", error)
            return False
        root = self.root.resolve()
        for parent in target.parents:
            if parent.parent == root or parent == root:
                break
            try:
                parent.rmdir()
            except OSError:
                break  # not empty, or not there
        return is_removed

    def size(self, folder: str) -> int:
        """Return the bytes of a folder's files; 0 if it is gone."""
        try:
            with os.scandir(self.root / folder) as entries:
                return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.is_file())
        except FileNotFoundError:  # deleted meanwhile
            return 0

    def _sync(self, folder: str) -> None:
        """Bring a folder's files to the disk, then their names and the folder's, up to the data folder. Blocks.

        Called before a row refers to the folder: after a power cut, what the row promises must be there.
        """
        root, target = self.root.resolve(), self.resolve(folder)
        for file in target.iterdir():
            sync(file)
        for path in (target, *target.parents):
            sync(path)
            if path == root:
                break


def link_or_copy(source: Path, target: Path) -> None:
    """Link a file, or copy it. A link is as good as a copy, because checkpoint files never change."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
