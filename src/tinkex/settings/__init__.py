"""The only reader of the environment and of configuration files. An explicit argument always wins.

`client` settles what a client needs (`Config`), `serve` what a service needs (`ServeConfig`), `places` knows where
files lie on this machine. Every name stands in a table; `docs/settings.md` is made from them.
"""

from __future__ import annotations

from tinkex.settings.client import (
    DEFAULT_BASE_URL,
    ENVIRONMENT,
    KEYLESS,
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
    with_overrides,
)
from tinkex.settings.serve import (
    KEY_PREFIX,
    SERVE,
    ServeConfig,
    Setting,
    check_keys,
    is_loopback_host,
    private_environment,
    resolve_serve,
    write_private_file,
)

__all__ = [
    "DEFAULT_BASE_URL",
    "ENVIRONMENT",
    "KEYLESS",
    "KEY_PREFIX",
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
    "with_overrides",
    "write_private_file",
]
