"""Compares the files of a checkpoint with the checksums in its row, before anything uses them.

A disk may change bits, and a weight that is a little wrong trains on without a word.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from tinkex.errors import TinkexError
from tinkex.store.records import CheckpointRecord, DamagedJson


class DamagedCheckpoint(TinkexError):
    """A file of a checkpoint is not what was written. The service is at fault, not its client."""


class FileMark(NamedTuple):
    """Tells a file from one that was written later under the same name."""

    inode: int
    modified_ns: int
    size: int


def mark_of(file: Path) -> FileMark:
    status = os.stat(file)
    return FileMark(status.st_ino, status.st_mtime_ns, status.st_size)


def check_row(checkpoint: CheckpointRecord) -> None:
    """Raise DamagedCheckpoint if the row does not say which files there are: no file would then be checked at all."""
    if isinstance(checkpoint.files, DamagedJson):
        raise DamagedCheckpoint(
            f"The service's record of the files of {checkpoint.path} was damaged, so they cannot be checked. "
            "Use another checkpoint, or ask who runs the service to restore it from a backup."
        )


def check_files(checkpoint: CheckpointRecord, folder: Path, *, may_skip_known: bool = True) -> None:
    """Raise DamagedCheckpoint if a file is not as its row says, FileNotFoundError if it is gone. Blocks.

    Files that were read before and have not been written since are not read again; `may_skip_known=False` always reads
    them.
    """
    check_row(checkpoint)
    for name, about in checkpoint.files.items():
        file = folder / name
        mark = mark_of(file)
        digest = _digest if may_skip_known else _digest.__wrapped__
        if mark.size != about["size_bytes"] or digest(file, mark) != about["sha256"]:
            raise DamagedCheckpoint(
                f"The file {name} of {checkpoint.path} was damaged on the service's disk: it is not what was written. "
                "Use another checkpoint, or ask who runs the service to restore it from a backup."
            )


@functools.lru_cache(maxsize=4096)
def _digest(file: Path, mark: FileMark) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
