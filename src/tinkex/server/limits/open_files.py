"""Raises the number of files that this process may open, and fits the number of connections to it."""

from __future__ import annotations

import logging
from dataclasses import replace

from tinkex.settings import ServeConfig

logger = logging.getLogger("tinkex.server")

WANTED_FILES = (65_536, 10_240)
"""What to try, in this order; macOS allows no more than the second."""
SPARE_FILES = 64
"""For the database, the engine's pipe, the log, and files that are being read or written."""


def raise_file_limit() -> int | None:
    """Raise the soft limit of open files towards the hard one; return what it is then, None if there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in WANTED_FILES:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= most:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # the kernel may allow less than the limit says
            continue
        soft = most
        break
    return None if soft == resource.RLIM_INFINITY else soft


def fit_connections(config: ServeConfig, files: int | None) -> ServeConfig:
    """Return the configuration with as many connections as there can be open files.

    Half of them: when the service is full, addresses with few connections still get in, up to twice the limit.
    """
    if files is None or config.max_connections <= (most := max((files - SPARE_FILES) // 2, 1)):
        return config
    logger.warning("%d files can be open, so at most %d connections (ulimit -n); more are rejected", files, most)
    return replace(config, max_connections=most)
