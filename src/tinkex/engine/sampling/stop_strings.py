"""Stop strings: finds out whether the text of a sample has reached one. Decodes as little as possible for every token.

A character may be spread over several tokens, and many tokenizers decode a token differently at the start of a text
(they drop a leading space). So every token is decoded together with a few before it, those of the prompt included.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.contract import EngineFault

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT_TOKENS = 6
"""Tokens decoded before the new one: enough for the bytes of any character and the start of a word."""
MAX_WAITING_TOKENS = 8
"""After so many tokens bytes that make no character count as text as they are: no character has more than four."""
REPLACEMENT = "\ufffd"
"""The character that decoders write for incomplete bytes."""


class StopStrings:
    """Watches one sequence. Call `add_token` with every token in turn."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._groups = _by_size(strings)
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._decoded = len(self._tokens)
        """How many of them are text already; the rest waits for the bytes of its last character."""
        self._tail = ""
        """The end of the text so far, in which a longer match may have begun."""
        self._longest = max(len(string) for string in strings)

    def add_token(self, token: int) -> bool:
        """Return whether a stop string is complete with this token (it may end inside the token's text)."""
        self._tokens.append(token)
        text = self._new_text()
        is_whole = not text.endswith(REPLACEMENT) or len(self._tokens) - self._decoded >= MAX_WAITING_TOKENS
        # Else the last character is still incomplete.
        if self._has_stop_string(text if is_whole else text.rstrip(REPLACEMENT)):
            return True
        if is_whole:
            self._tail = (self._tail + text)[-self._longest :]
            self._tokens = self._tokens[-CONTEXT_TOKENS:]
            self._decoded = len(self._tokens)
        return False

    def _has_stop_string(self, text: str) -> bool:
        """Return whether a stop string ends in this text, which follows the tail.

        Each string is looked for where it can newly be, and a little before. In the whole tail, which is as long as the
        longest string, 255 short strings beside a long one took 3 ms per token.
        """
        recent = self._tail + text
        for size, strings in self._groups:
            end = recent[-(size + len(text)) :]
            if any(string in end for string in strings):
                return True
        return False

    def _new_text(self) -> str:
        before = self._decode(self._tokens[: self._decoded]).rstrip(REPLACEMENT)
        after = self._decode(self._tokens)
        # Some decoders write the end of a text differently once more follows: the new text begins where they differ.
        pairs = enumerate(zip(before, after, strict=False))
        return after[next((index for index, (old, new) in pairs if old != new), min(len(before), len(after))) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _by_size(strings: Sequence[str]) -> list[tuple[int, list[str]]]:
    """Group strings of about the same length. Returns a size that none in the group reaches, at most twice as large."""
    groups: dict[int, list[str]] = {}
    for string in strings:
        groups.setdefault(1 << len(string).bit_length(), []).append(string)
    return list(groups.items())


def load_tokenizer(folder: str, name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise EngineFault(
            f"{name} has no tokenizer.json, so stop strings cannot be matched. Give stop token ids instead."
        )
    return Tokenizer.from_file(str(path))
