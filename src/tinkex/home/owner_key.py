"""`private.key`: the key that every service on a folder accepts as that of the folder's owner."""

from __future__ import annotations

import os
from pathlib import Path

KEY_FILE = "private.key"


def read_key(folder: Path) -> str | None:
    """Return the owner's key, if a service has ever run on the folder."""
    try:
        return (folder / KEY_FILE).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def write_key(folder: Path, key: str) -> None:
    """Keep the key for the folder's owner alone. For the service that holds the folder's lock."""
    with os.fdopen(os.open(folder / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(key + "\n")
