"""Unpacks a checkpoint archive without trusting it: nothing is written outside the folder, no links, no devices."""

from __future__ import annotations

import tarfile
from pathlib import Path

from tinkex.errors import TinkexError


def unpack(archive: Path, folder: Path) -> list[Path]:
    """The files of a tar archive, written below `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            for member in members:
                if not (member.isfile() or member.isdir()):
                    raise TinkexError(f"{archive.name} holds {member.name!r}, which is neither a file nor a folder.")
            # The "data" filter of the standard library refuses absolute names and `..`.
            tar.extractall(folder, members=members, filter="data")
    except (tarfile.TarError, EOFError) as problem:
        raise TinkexError(f"{archive.name} cannot be unpacked: {problem}. Delete it and download again.") from None
    return [folder / member.name for member in members if member.isfile()]
