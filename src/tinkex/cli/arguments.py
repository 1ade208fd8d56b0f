"""Words on the command line that are more than text: counts, lengths of time, token ids. Bad ones meet a remedy."""

from __future__ import annotations

import argparse
import re

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def count(text: str) -> int:
    """A whole number from 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def temperature(text: str) -> float:
    """A number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no temperature; write a number from 0, such as 0.7")
    return value


def seconds(text: str) -> int:
    """3600, 90s, 15m, 12h, 7d or 2w."""
    found = re.fullmatch(r"(\d+)([smhdw]?)", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time; write 3600, 90s, 15m, 12h, 7d or 2w")
    return int(found[1]) * UNITS[found[2]]


def seconds_or_keep(text: str) -> int | None:
    """A length of time, or None for `keep`."""
    return None if text == "keep" else seconds(text)


def token_ids(text: str) -> list[int]:
    """Whole numbers, with spaces or commas between them."""
    words = re.split(r"[\s,]+", text.strip("[] \t\n,"))
    if not all(word.isascii() and word.isdigit() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids; write for example '12,7,345'")
    return [int(word) for word in words]
