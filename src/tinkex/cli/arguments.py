"""Checks values on the command line: counts, durations, token ids. Errors say what to write instead."""

from __future__ import annotations

import argparse
import re

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def count(text: str) -> int:
    """Read a whole number from 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def temperature(text: str) -> float:
    """Read a number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature; write a number from 0 up, such as 0.7")
    return value


def seconds(text: str) -> int:
    """Read a duration: 3600, 90s, 15m, 12h, 7d or 2w."""
    match = re.fullmatch(r"(\d+)([smhdw]?)", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write 3600, 90s, 15m, 12h, 7d or 2w")
    return int(match[1]) * UNITS[match[2]]


def seconds_or_keep(text: str) -> int | None:
    """Read a duration, or `keep` as None."""
    return None if text == "keep" else seconds(text)


def token_ids(text: str) -> list[int]:
    """Read whole numbers, separated by spaces or commas."""
    ids = re.split(r"[\s,]+", text.strip("[] \t\n,"))
    if not all(number.isascii() and number.isdigit() for number in ids):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids; write for example '12,7,345'")
    return [int(number) for number in ids]
