"""The task of the second demo: name the opposite of a word, in one word. Every completion gets a reward."""

from __future__ import annotations

import random
import re

STOP = "\n"
MOST_TOKENS = 6

PAIRS = [
    pair.split()
    for pair in (
        "hot cold, big small, up down, fast slow, old new, wet dry, hard soft, open closed, day night, happy sad, "
        "high low, light dark, long short, full empty, rich poor, early late, strong weak, clean dirty, "
        "inside outside, win lose, push pull, true false, left right, north south, loud quiet, thick thin, "
        "begin end, love hate, summer winter, sweet sour"
    ).split(", ")
]


def questions(seed: int, step: int, count: int) -> list[tuple[str, str]]:
    """Return prompts with the expected words; each step has others."""
    chosen = random.Random(f"{seed}/{step}").sample(PAIRS, count)
    return [(f"The opposite of {word} is", opposite) for word, opposite in chosen]


def reward(completion: str, expected: str) -> float:
    """Return 1 for the word alone, 0.5 with more words, 0 for another word. Quotes and full stops are ignored."""
    text = completion.removesuffix("<|im_end|>").strip().strip("\"'").lower()
    if re.fullmatch(rf"{expected}[\"']?\.?[\"']?", text):
        return 1.0
    return 0.5 if re.match(rf"{expected}\b", text) else 0.0
