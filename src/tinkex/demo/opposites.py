"""The task of the second demo: say the opposite, in one word. Nobody shows how; every answer is given points."""

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
    """Prompt and answer of some words, others at every step."""
    chosen = random.Random(f"{seed}/{step}").sample(PAIRS, count)
    return [(f"The opposite of {word} is", opposite) for word, opposite in chosen]


def reward(answer: str, wanted: str) -> float:
    """1 for the word alone, 0.5 for the word and more, 0 for another word. Quotes and a full stop do not matter."""
    said = answer.removesuffix("<|im_end|>").strip().strip("\"'").lower()
    if re.fullmatch(rf"{wanted}[\"']?\.?[\"']?", said):
        return 1.0
    return 0.5 if re.match(rf"{wanted}\b", said) else 0.0
