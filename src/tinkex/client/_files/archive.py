"""Unpacks a checkpoint archive without trusting it: nothing is written outside the folder, no links, no devices."""

from __future__ import annotations

import gzip
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO, Final, cast

from tinkex.archive import BadArchive, Member, members
from tinkex.errors import TinkexError

MAX_MEMBERS: Final = 10_000
MAX_RATIO: Final = 100
"""Times that an archive may expand. One of an adapter that was never trained, half of it zeros, expands six times."""
FREE_BYTES: Final = 64 << 20
"""Archives may expand to this size whatever their own."""


def unpack(archive: Path, folder: Path) -> list[Path]:
    """Write the files of a tar archive (plain or gzip) below `folder`; return their paths. Checks all names first."""
    try:
        targets, size_bytes = [], 0
        with _opened(archive) as entries:
            for member in entries:
                size_bytes += member.size
                if member.is_file:
                    targets.append(safe_path(folder, member.name))
        _check_room(archive, folder, size_bytes)
        with _opened(archive) as entries:
            for member, target in zip((member for member in entries if member.is_file), targets, strict=True):
                _write(member, target)
    except (BadArchive, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TinkexError(f"{archive} cannot be unpacked: {error}. Delete it and download again.") from None
    except OSError as error:
        raise TinkexError(f"{archive} cannot be unpacked: {error.strerror or error}.") from error
    return targets


@contextmanager
def _opened(archive: Path) -> Iterator[Iterator[Member]]:
    with archive.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        max_bytes = max(archive.stat().st_size * MAX_RATIO, FREE_BYTES)
        content = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip else file
        yield members(content, MAX_MEMBERS, max_bytes)


def _check_room(archive: Path, folder: Path, size_bytes: int) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if size_bytes > free_bytes:
        raise TinkexError(
            f"{archive} cannot be unpacked: its files have {size_bytes:,} bytes, and the disk has {free_bytes:,} free."
        )


def safe_path(folder: Path, name: str) -> Path:
    """Return the path of a file that somebody else named: always below `folder`."""
    parts = PurePosixPath(name).parts
    windows = PureWindowsPath(name)  # splits at both kinds of slash, and knows drives
    if not parts or "\0" in name or ".." in windows.parts or windows.drive or windows.root:
        raise TinkexError(f"Rejected a file named {name!r}: it would be written outside {folder}.")
    return folder.joinpath(*parts)


def _write(member: Member, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # A file that has its name is whole. Owner, mode and links of the archive are left behind on purpose.
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        file.writelines(member.blocks())
    part.replace(target)
