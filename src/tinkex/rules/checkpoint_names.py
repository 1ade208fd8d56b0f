"""What a checkpoint may be called, and how long it may be kept."""

from __future__ import annotations

import re
from typing import Final

from tinkex.rules.ranges import reject
from tinkex.types.coerce import describe

MAX_NAME_LENGTH: Final = 200
"""A name becomes a folder, and file systems allow 255 bytes: the rest is for the suffixes of temporary files."""
MAX_TTL_S: Final = 100 * 365 * 86400

_NAME = re.compile(r"[\w\-+=:@,~][\w.\-+=:@,~]*", re.ASCII)


def check_name(name: object, where: str = "name") -> str:
    """Return the name of a checkpoint. It becomes part of paths and URLs."""
    if not isinstance(name, str):
        reject(where, f"must be a checkpoint's name (a str), got {describe(name)}.", "bad_name")
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        reject(
            where,
            f"must be a checkpoint's name, got {describe(name)}. A name has 1 to {MAX_NAME_LENGTH} ASCII letters, "
            "digits and _ . - + = : @ , ~ (no slash, no space, no dot at the beginning), such as 'step-000100'.",
            "bad_name",
        )
    return name


def check_ttl(ttl_seconds: object) -> int | None:
    """Return a time to live in seconds; None keeps the checkpoint until it is deleted."""
    if ttl_seconds is None:
        return None
    if type(ttl_seconds) is not int or not 1 <= ttl_seconds <= MAX_TTL_S:
        reject(
            "ttl_seconds",
            f"must be a whole number of seconds from 1 to {MAX_TTL_S}, or None, got {describe(ttl_seconds)}.",
            "bad_ttl",
        )
    return ttl_seconds
