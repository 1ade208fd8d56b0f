"""API keys: random, stored as hashes, recognizable by their hint."""

from __future__ import annotations

import hashlib
import string

from tinkex.store.access import hash_key, hint, new_key


def test_a_new_key_is_accepted_by_official_clients() -> None:
    key = new_key()
    assert key.startswith("tml-")
    assert len(key) >= 44
    assert set(key) <= set(string.ascii_letters + string.digits + "-_")


def test_no_two_keys_are_alike() -> None:
    assert len({new_key() for _ in range(1000)}) == 1000


def test_the_hash_is_sha256_of_the_key() -> None:
    assert hash_key("tml-abc") == hashlib.sha256(b"tml-abc").hexdigest()


def test_any_text_can_be_hashed_because_any_text_can_arrive_as_a_key() -> None:
    assert len({hash_key("ключ"), hash_key("\udcff"), hash_key(""), hash_key("\0")}) == 4


def test_a_hint_shows_too_little_to_guess_the_key() -> None:
    key = new_key()
    assert hint(key) == f"{key[:8]}…{key[-4:]}"
    assert hint("tml-secret") == "tml-…"
    assert hint("secret") == "…"
