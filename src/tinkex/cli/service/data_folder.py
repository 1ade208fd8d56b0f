"""What commands on a service's own data have in common: the flags that say where it is, and opening its store.

They work on the files and the database themselves, with or without a server running beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from tinkex.settings import ServeConfig, Setting
    from tinkex.store.store import Store

PLACE = ("data_dir", "database_url")
WORK = "Looking into a service's data"


def add_flags(group: Any, names: Iterable[str]) -> None:
    """The flags of these settings. Their values are read as everywhere else; absent ones are left to the settings."""
    from tinkex.settings import SERVE

    rows = {setting.name: setting for setting in SERVE}
    for name in names:
        setting = rows[name]
        group.add_argument(
            setting.flag,
            dest=name,
            metavar=setting.metavar,
            # A flag that may be repeated has a word in the singular.
            action="append" if setting.word else "store",
            type=_reader(setting),
            help=f"{setting.about} ({setting.variable})".replace("%", "%%"),
        )


def config_of(args: argparse.Namespace) -> ServeConfig:
    """The service's settings: the flags of this command, then environment, file and defaults."""
    from tinkex.settings import SERVE, resolve_serve

    return resolve_serve(**{setting.name: getattr(args, setting.name, None) for setting in SERVE})


def open_store(config: ServeConfig) -> Store:
    """The store of the service. It is not made here: a mistyped folder would otherwise come to be, empty."""
    from tinkex.errors import ConfigError
    from tinkex.local_service import needs_local

    needs_local(WORK)  # first: without it there cannot be such a folder, and its name would be looked for in vain
    if not config.data_dir.is_dir() and config.database_url.startswith("sqlite"):
        raise ConfigError(
            f"There is no service's data in {config.data_dir}. Name its folder with --data-dir; "
            "`tinkex serve` makes it."
        )
    return new_store(config)


def new_store(config: ServeConfig) -> Store:
    """The same, made if it is not there."""
    from tinkex.local_service import needs_local

    needs_local(WORK)
    from tinkex.store.store import Store

    return Store.open(config.database_url, config.data_dir, durability=config.durability)


def _reader(setting: Setting) -> Any:
    import argparse

    def read(text: str) -> Any:
        try:
            value = setting.read(text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(f"must be {problem}") from None
        return value[0] if setting.word else value

    return read
