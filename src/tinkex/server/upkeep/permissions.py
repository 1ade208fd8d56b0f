"""Keeps what a service stores from other users of its machine: weights, prompts, the hashes of keys."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from tinkex.settings import ServeConfig

logger = logging.getLogger("tinkex.server")

PRIVATE_UMASK = 0o077
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private(config: ServeConfig) -> None:
    """Let this process and its engine create files for their owner only, and warn of what others can read.

    Permissions of what exists are not changed: a group may be meant to read it, for example to make backups.
    """
    os.umask(PRIVATE_UMASK)
    config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.name != "posix":
        return
    folder, database = config.data_dir, _database_file(config.database_url)
    if _is_open(folder):
        logger.warning(
            "other users of this machine can read the data folder; unless that is wanted, run: chmod 700 %s", folder
        )
    if database is not None and database.parent.resolve() != folder.resolve() and _is_open(database):
        logger.warning(
            "other users of this machine can read the database; unless that is wanted, run: chmod 600 %s", database
        )


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & _OTHERS)
    except FileNotFoundError:
        return False


def _database_file(url: str) -> Path | None:
    name = url.removeprefix("sqlite:///")
    return Path(name) if name != url else None
