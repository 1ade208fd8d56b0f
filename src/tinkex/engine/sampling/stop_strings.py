"""Stop strings: has the text of a sample come to one yet? Text is decoded token by token, as little as possible.

A character may be spread over tokens, and many tokenizers decode a token differently at the start of a text (a leading
space goes), so every token is decoded together with a few that stand before it, those of the prompt included.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.contract import EngineFault

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT = 6
"""Tokens of the prompt that are decoded with the first one: enough for any character's bytes and a word's start."""
PATIENCE = 8
"""After so many tokens bytes that make no character are text as they are: no character has more than four."""
BROKEN = "\ufffd"


class StopStrings:
    """Watches one sequence. `push` every token in turn."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._tokens = list(prompt[-CONTEXT:])
        self._read = len(self._tokens)
        """So many of them are text already; the rest waits for the bytes of its last character."""
        self._tail = ""
        """The end of the text so far: what a longer match may have begun with."""
        self._longest = max(len(string) for string in strings)

    def push(self, token: int) -> bool:
        """True if a stop string is complete with this token (it may end inside it)."""
        self._tokens.append(token)
        text = self._new_text()
        # The last character may still be waiting for its bytes.
        if any(string in self._tail + text.rstrip(BROKEN) for string in self._strings):
            return True
        if not text.endswith(BROKEN) or len(self._tokens) - self._read >= PATIENCE:
            self._tail = (self._tail + text)[-self._longest :]
            self._tokens = self._tokens[-CONTEXT:]
            self._read = len(self._tokens)
        return False

    def _new_text(self) -> str:
        before = self._decode(self._tokens[: self._read]).rstrip(BROKEN)
        after = self._decode(self._tokens)
        # Some decoders write the end of a text differently once more follows; only what is equal was text before.
        pairs = enumerate(zip(before, after, strict=False))
        return after[next((at for at, (one, other) in pairs if one != other), min(len(before), len(after))) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def load_tokenizer(folder: str, name: str) -> Tokenizer:
    """The tokenizer in a model's folder."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise EngineFault(
            f"{name} has no tokenizer.json, so stop strings cannot be matched. Give stop token ids instead."
        )
    return Tokenizer.from_file(str(path))
