"""What a run may be called, and its tags; and how a client that only knows `user_metadata` gives both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tinkex.rules.ranges import reject
from tinkex.types.coerce import describe

LATEST: Final = "latest"
"""Names the run that was used last, so no run can have it as its name."""
LEAST_PREFIX: Final = 4
"""Characters of an id that may stand for it, if they are the beginning of one only."""
MAX_NAME_LENGTH: Final = 200
MAX_TAG_LENGTH: Final = 64
MAX_TAGS: Final = 32
NAME_KEYS: Final = ("name", "run_name")
"""The fields of `user_metadata` that name a run; the first one that is there."""


def check_run_name(name: object, where: str = "name") -> str | None:
    """Return the name of a run without spaces around it; None, like an empty text, is no name."""
    if name is None:
        return None
    if not isinstance(name, str) or not name.isprintable() or len(name.strip()) > MAX_NAME_LENGTH:
        reject(
            where,
            f"must be the name of a run, got {describe(name)}. A name has at most {MAX_NAME_LENGTH} printable "
            "characters, such as 'dpo, second try'.",
            "bad_name",
        )
    if name.strip() == LATEST or name.strip().startswith("tinker://"):
        reject(where, f"cannot be {name.strip()[:50]!r}: that stands for something else already.", "bad_name")
    return name.strip() or None


def check_tags(tags: object, where: str = "tags") -> list[str]:
    """Return the tags of a run, each once, without spaces around them. None is no tags."""
    if tags is None:
        return []
    if isinstance(tags, str) or not isinstance(tags, (list, tuple, set, frozenset)):
        reject(where, f"must be a list of texts, got {describe(tags)}.", "bad_tags")
    for tag in tags:
        if not _is_tag(tag):
            reject(
                where,
                f"cannot have {describe(tag)}. A tag has 1 to {MAX_TAG_LENGTH} printable characters and no comma.",
                "bad_tags",
            )
    unique = list(dict.fromkeys(tag.strip() for tag in tags))
    if len(unique) > MAX_TAGS:
        reject(where, f"are {len(unique)}; a run has at most {MAX_TAGS}.", "bad_tags")
    return unique


def name_in(metadata: Mapping[str, Any] | None) -> str | None:
    """Return the name that `user_metadata` gives to a run. What is no name is passed over: the run matters more."""
    found = next((metadata[key] for key in NAME_KEYS if metadata.get(key)), None) if metadata else None
    return printable_name(found)


def printable_name(text: object) -> str | None:
    """Return a text that was not meant as the name of a run, as such; None if nothing of it can be one."""
    if not isinstance(text, str):
        return None
    name = "".join(character if character.isprintable() else " " for character in text).strip()[:MAX_NAME_LENGTH]
    return None if not name or name == LATEST or name.startswith("tinker://") else name.strip()


def tags_in(metadata: Mapping[str, Any] | None) -> list[str]:
    """Return the tags that `user_metadata` gives to a run: a list, or a text with commas, for metadata are texts."""
    given = metadata.get("tags") if metadata else None
    tags = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else []
    return list(dict.fromkeys(tag.strip() for tag in tags if _is_tag(tag)))[:MAX_TAGS]


def with_name(
    metadata: Mapping[str, str] | None, name: str | None, tags: list[str] | tuple[str, ...] | None
) -> Mapping[str, str] | None:
    """Return `user_metadata` that also gives a name and tags, in the form that every service takes."""
    given = {"name": check_run_name(name), "tags": ", ".join(check_tags(tags))}
    added = {key: text for key, text in given.items() if text}
    return {**(metadata or {}), **added} if added else metadata


def _is_tag(tag: object) -> bool:
    return isinstance(tag, str) and 0 < len(tag.strip()) <= MAX_TAG_LENGTH and tag.isprintable() and "," not in tag
