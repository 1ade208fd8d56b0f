"""`service.json`: how programs of the same user find the service that runs on a data folder.

The service writes it when it is ready and removes it before it stops. A service that was killed leaves it behind, so a
reader believes it only while the process it names holds the folder's lock.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tinkex.home.lock import holder_pid

SERVICE_FILE = "service.json"
LOG_FILE = "service.log"
"""The log of a service that runs in the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningService:
    """What a service says of itself to other programs of its user."""

    url: str
    """Its address on this machine."""
    pid: int
    version: str
    models: tuple[str, ...]
    """The base models it was started with."""
    started_at: float
    needs_key: bool = False
    """Whether it rejects a request without a key; the owner's is in `private.key`."""
    ends_unused: bool = False
    """Whether it ends by itself after its last user has left."""
    log: str | None = None
    """The file with its log; None: it logs to the terminal it was started in."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings it was started with, without secrets."""


def write_service(folder: Path, service: RunningService) -> None:
    """Say that the service is ready. Only its owner may read the file."""
    import json  # not at the top: most programs that load this module need no file

    unfinished = folder / f"{SERVICE_FILE}.{service.pid}"
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        json.dump(asdict(service), out, indent=1)
    os.replace(unfinished, folder / SERVICE_FILE)


def remove_service(folder: Path) -> None:
    """Say that there is no service to use any more."""
    with suppress(OSError):
        (folder / SERVICE_FILE).unlink()


def running_service(folder: Path) -> RunningService | None:
    """Return the service that runs on a data folder and is ready, if there is one."""
    import json

    try:
        written = json.loads((folder / SERVICE_FILE).read_text(encoding="utf-8"))
        known = {field.name for field in fields(RunningService)}  # another version may write more
        service = RunningService(**{name: value for name, value in written.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return service if holder_pid(folder) == service.pid else None
