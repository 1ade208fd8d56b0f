"""Finds the home: the data folder that programs of a user share by default, and the service that runs on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tinkex.home.owner_key import read_key
from tinkex.home.running import RunningService, running_service
from tinkex.settings.folders import home_folder
from tinkex.settings.serve import SERVE, ServeConfig


def client_arguments(folder: Path, service: RunningService) -> dict[str, Any]:
    """Return what a client of the folder's owner passes to `resolve`.

    No proxy, whatever the settings say: a proxy cannot reach a port of this machine.
    """
    return {"base_url": service.url, "api_key": read_key(folder), "proxy": ""}


def home() -> Path:
    """Return the data folder of `tinkex serve`, as the environment and the file say."""
    return home_folder(os.environ)


def service_of_home() -> tuple[Path, RunningService] | None:
    """Return the home and the service that runs on it, if one does."""
    folder = home()
    service = running_service(folder)
    return None if service is None else (folder, service)


def shown_settings(config: ServeConfig) -> dict[str, Any]:
    """Return the settings of a service that it may show to other programs of its user, as plain values."""
    shown: dict[str, Any] = {}
    for setting in SERVE:
        value = getattr(config, setting.name)
        if value is not None and not setting.is_secret and not isinstance(value, tuple):
            shown[setting.name] = str(value) if isinstance(value, Path) else value
    return shown
