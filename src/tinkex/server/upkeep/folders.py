"""Checkpoint folders on disk. A path outside the data folder is an error, whatever a row says."""

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
    """Return the absolute path of a folder that a row names. Raises if it is outside the data folder."""
    root = data_dir.resolve()
    path = (root / folder).resolve()
    if path == root or not path.is_relative_to(root):
        raise TinkexError(f"The folder {folder!r} of a record lies outside the data folder; it is left alone.")
    return path


def remove(data_dir: Path, folder: str) -> bool:
    """Delete a folder, and its parents if they are empty then. The janitor retries a folder that cannot be deleted."""
    try:
        target = resolve_inside(data_dir, folder)
        shutil.rmtree(target)
    except FileNotFoundError:
        return False
    except (OSError, TinkexError) as error:
        logger.warning("a folder could not be deleted: %s", error)
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
    """Return an unused folder name, relative to the data folder, and create its parent."""
    folder = f"checkpoints/{run_id}/{kind}/{name}"
    if (data_dir / folder).exists():
        folder = f"{folder}.{uuid4().hex[:8]}"
    resolve_inside(data_dir, folder).parent.mkdir(parents=True, exist_ok=True)
    return folder


def link_or_copy(source: Path, target: Path) -> None:
    """Link a file, or copy it. A link is as good as a copy, because checkpoint files never change."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
