"""Folders of checkpoints on the disk: all inside the data folder, whatever a row says."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from uuid import uuid4

from tinkex.errors import TinkexError

logger = logging.getLogger("tinkex.server")

EPHEMERAL = "ephemeral"
"""checkpoints/{run}/ephemeral/{number}: the weights of samplers without a name."""


def resolve_inside(data_dir: Path, folder: str) -> Path:
    """The absolute path of a folder that a row names. Raises if it would lie elsewhere."""
    root = data_dir.resolve()
    found = (root / folder).resolve()
    if found == root or not found.is_relative_to(root):
        raise TinkexError(f"The folder {folder!r} of a record lies outside the data folder; it is left alone.")
    return found


def remove(data_dir: Path, folder: str) -> bool:
    """Delete a folder and the parents that this empties. A folder that cannot be deleted is left to the janitor."""
    try:
        target = resolve_inside(data_dir, folder)
        shutil.rmtree(target)
    except FileNotFoundError:
        return False
    except (OSError, TinkexError) as problem:
        logger.warning("a folder could not be deleted: %s", problem)
        return False
    root = data_dir.resolve()
    for parent in target.parents:
        if parent.parent == root or parent == root:
            break
        try:
            parent.rmdir()
        except OSError:
            break  # not empty
    return True


def new_folder(data_dir: Path, run_id: str, kind: str, name: str) -> str:
    """A folder that nothing uses yet, relative to the data folder; what is above it is there."""
    folder = f"checkpoints/{run_id}/{kind}/{name}"
    if (data_dir / folder).exists():
        folder = f"{folder}.{uuid4().hex[:8]}"
    resolve_inside(data_dir, folder).parent.mkdir(parents=True, exist_ok=True)
    return folder


def link_or_copy(source: Path, target: Path) -> None:
    """Checkpoint files are never written again, so a second name for the same bytes is as good as a copy."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
