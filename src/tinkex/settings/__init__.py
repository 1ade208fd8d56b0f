"""The only reader of the environment and of configuration files. An explicit argument always wins.

Others import this package only:
    client    resolves what a client needs (`Config`, table `CLIENT`)
    serve     resolves what a service needs (`ServeConfig`, table `SERVE`)
    setting   one row of such a table, and how values are gathered and read
    folders   where files are on this machine

`docs/settings.md` and the flags of `tinkex serve` are made from the tables.
"""

from __future__ import annotations

from tinkex.settings.client import (
    CLIENT,
    DEFAULT_BASE_URL,
    ENVIRONMENT,
    KEYLESS,
    LOG,
    LOOPBACK,
    POOL_SIZES,
    SHARED_ENVIRONMENT,
    Config,
    is_loopback,
    log_level,
    normalise_url,
    proxy_for,
    resolve,
    sources,
)
from tinkex.settings.serve import (
    KEY_PREFIX,
    SERVE,
    ServeConfig,
    check_keys,
    is_loopback_host,
    private_environment,
    resolve_serve,
    write_private_file,
)
from tinkex.settings.setting import Setting

__all__ = [
    "CLIENT",
    "DEFAULT_BASE_URL",
    "ENVIRONMENT",
    "KEYLESS",
    "KEY_PREFIX",
    "LOG",
    "LOOPBACK",
    "POOL_SIZES",
    "SERVE",
    "SHARED_ENVIRONMENT",
    "Config",
    "ServeConfig",
    "Setting",
    "check_keys",
    "is_loopback",
    "is_loopback_host",
    "log_level",
    "normalise_url",
    "private_environment",
    "proxy_for",
    "resolve",
    "resolve_serve",
    "sources",
    "write_private_file",
]
