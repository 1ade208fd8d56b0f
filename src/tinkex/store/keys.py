"""Creates API keys, and hashes them: only hashes are stored."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "tml-"
"""Official clients reject a key without this prefix."""


def new_key() -> str:
    """Return a new key of 256 random bits that is safe in a URL and in a shell."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the hash that is stored. Not a slow one: our keys cannot be guessed, and every request computes it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def hint(key: str) -> str:
    """Return how a key begins and ends, so that a person recognizes it. Of a short key almost nothing is shown."""
    if len(key) >= 24:
        return f"{key[:8]}…{key[-4:]}"
    return f"{PREFIX}…" if key.startswith(PREFIX) else "…"
