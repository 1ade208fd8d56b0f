"""Returns where files are on this machine: configuration, caches, data. Follows each system's conventions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigError


def config_dir(environ: Mapping[str, str]) -> Path:
    if sys.platform == "win32":
        return Path(environ.get("APPDATA") or Path.home()) / "tinkex"
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tinkex"


def cache_dir(environ: Mapping[str, str]) -> Path:
    if sys.platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or Path.home()) / "tinkex" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tinkex"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinkex"


def data_dir(environ: Mapping[str, str]) -> Path:
    if sys.platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or Path.home()) / "tinkex" / "data"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "tinkex"
    return Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tinkex"


def home_folder(environ: Mapping[str, str]) -> Path:
    """The data folder that programs of a user share: that of `tinkex serve`, as environment and file say."""
    named = environ.get("TINKEX_DATA_DIR", "").strip() or config_table(environ, "serve").get("data_dir")
    return Path(str(named)).expanduser().absolute() if named else data_dir(environ)


def config_file(environ: Mapping[str, str]) -> Path:
    named = environ.get("TINKEX_CONFIG")
    return Path(named) if named else config_dir(environ) / "tinkex.toml"


def config_table(environ: Mapping[str, str], name: str) -> dict[str, Any]:
    """A table of `tinkex.toml`; empty where there is no file. One that TINKEX_CONFIG names must exist."""
    path = config_file(environ)
    if not path.is_file():
        if environ.get("TINKEX_CONFIG"):
            raise ConfigError(f"TINKEX_CONFIG names {path}, which is not a file.")
        return {}
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get(name, {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} should be a table, [{name}].")
    return table
