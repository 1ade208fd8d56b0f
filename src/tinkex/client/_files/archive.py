"""Unpacks a checkpoint archive without trusting it: nothing is written outside the folder, no links, no devices."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath

from tinkex.errors import TinkexError


def unpack(archive: Path, folder: Path) -> list[Path]:
    """The files of a tar archive (plain or gzip), written below `folder`; gives their paths. Checks all names first."""
    try:
        with archive.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with tarfile.open(archive, "r:gz" if is_gzip else "r:") as tar:
            files = [
                (member, safe_path(folder, member.name)) for member in tar.getmembers() if _is_file(archive, member)
            ]
            for member, target in files:
                _write(tar, member, target)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TinkexError(f"{archive} cannot be unpacked: {error}. Delete it and download again.") from None
    except OSError as error:
        raise TinkexError(f"{archive} cannot be unpacked: {error.strerror or error}.") from error
    return [target for _, target in files]


def safe_path(folder: Path, name: str) -> Path:
    """Return the path of a file that somebody else named: always below `folder`."""
    parts = PurePosixPath(name).parts
    windows = PureWindowsPath(name)  # splits at both kinds of slash, and knows drives
    if not parts or "\0" in name or ".." in windows.parts or windows.drive or windows.root:
        raise TinkexError(f"Rejected a file named {name!r}: it would be written outside {folder}.")
    return folder.joinpath(*parts)


def _is_file(archive: Path, member: tarfile.TarInfo) -> bool:
    if not (member.isfile() or member.isdir()):
        raise TinkexError(f"{archive.name} holds {member.name!r}, which is neither a file nor a folder.")
    return member.isfile()


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None  # a file, as was checked
    target.parent.mkdir(parents=True, exist_ok=True)
    # A file that has its name is whole. Owner, mode and links of the archive are left behind on purpose.
    part = target.with_name(target.name + ".part")
    with source, part.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    part.replace(target)
