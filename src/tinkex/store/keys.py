"""API keys: made here, kept only as hashes."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "tml-"
"""Official clients refuse a key that begins otherwise."""


def new_key() -> str:
    """A fresh key: 256 random bits, safe in a URL and in a shell."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What is stored instead. A plain hash will do: a key of ours cannot be guessed, and every request pays for it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def hint(key: str) -> str:
    """How a key begins and ends, so that a person knows which one it is. A short key shows next to nothing."""
    if len(key) >= 24:
        return f"{key[:8]}…{key[-4:]}"
    return f"{PREFIX}…" if key.startswith(PREFIX) else "…"
