"""Shared by commands on a service's data: the flags that say where the data is, and opening its store.

These commands use the files and the database directly, whether a server is running or not.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import ConfigError
from tinkex.settings import SERVE, ServeConfig, Setting, bucket_access, resolve_serve

if TYPE_CHECKING:
    from tinkex.store.store import Store

LOCATION = ("data_dir", "database_url", "database_url_file")
WORK = "Reading a service's data"


def add_flags(group: Any, names: Iterable[str]) -> None:
    """Add the flags of these settings. A flag that is absent leaves its setting to environment, file and default."""
    rows = {setting.name: setting for setting in SERVE}
    for name in names:
        setting = rows[name]
        notes = [f"default {default}"] if (default := _default(setting)) else []
        about = f"{setting.about} ({'; '.join([*notes, setting.variable])})".replace("%", "%%")
        if setting.is_switch:
            group.add_argument(setting.flag, dest=name, action="store_const", const=True, help=about)
            continue
        group.add_argument(
            setting.flag,
            dest=name,
            metavar="|".join(setting.choices) or setting.metavar,
            # A flag that may be repeated has a name in the singular.
            action="append" if setting.word else "store",
            type=_reader(setting),
            help=about,
        )


def _default(setting: Setting) -> str:
    """Return the default of a setting as one would write it; "" if it has none that a word can say."""
    default = ServeConfig.__dataclass_fields__[setting.name].default
    if default is MISSING:
        return "in your data folder" if setting.name == "data_dir" else "in your cache folder"
    if default is None or default == "" or default == () or setting.is_switch:
        return ""
    return (
        ", ".join(default)
        if isinstance(default, tuple)
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )


def config_of(args: argparse.Namespace) -> ServeConfig:
    """Return the service's settings: the flags of this command, then environment, file and defaults."""
    return resolve_serve(**{setting.name: getattr(args, setting.name, None) for setting in SERVE})


def open_store(config: ServeConfig) -> Store:
    """Open the store of a service. It is not created: a mistyped folder name would otherwise become an empty folder."""
    from tinkex.local_service import needs_local

    needs_local(WORK)  # first: without the extra there can be no such folder
    file = Path(config.database_url.removeprefix("sqlite:///"))
    if config.database_url.startswith("sqlite") and not file.is_file():
        raise ConfigError(
            f"{config.data_dir} holds no data of a service ({file} does not exist). Name the folder with --data-dir; "
            "`tinkex serve` creates it."
        )
    return new_store(config)


def new_store(config: ServeConfig) -> Store:
    """Open the store of a service; create it if there is none."""
    from tinkex.local_service import needs_local

    needs_local(WORK)
    from tinkex.store.blobs.bucket import Bucket
    from tinkex.store.store import Store

    bucket = None if config.blobs is None else Bucket(config.blobs, bucket_access())
    return Store.open(config.database_url, config.data_dir, durability=config.durability, bucket=bucket)


def _reader(setting: Setting) -> Any:
    def read(text: str) -> Any:
        try:
            value = setting.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be {error}") from None
        return value[0] if setting.word else value

    return read


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
