"""The tokenizers of the served models: text to tokens, tokens to text (also token by token), messages to a prompt.

Uses the light `tokenizers` library. A model's files are read on first use, which takes a moment: do that in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tinkex.clock import REAL, Clock
from tinkex.server.http.errors import bad_request
from tinkex.server.sampling.chat_templates import ChatTemplate
from tinkex.server.upkeep.catalog import Catalog

_REPLACEMENT: Final = "\ufffd"
"""What tokenizers return for bytes that are no character, or not yet a whole one."""
_WINDOW_TOKENS: Final = 64
_CONTEXT_TOKENS: Final = 16


class Tokenizers:
    """Loads each served model's tokenizer on first use and keeps it. Safe to use from any thread."""

    def __init__(self, catalog: Catalog, clock: Clock = REAL) -> None:
        self._catalog = catalog
        self._clock = clock
        self._loaded: dict[str, ModelTokenizer] = {}
        self._lock = threading.Lock()

    def load(self, model_name: str) -> ModelTokenizer:
        """Return the tokenizer of a served model, by name or alias."""
        info = self._catalog.find(model_name)
        known = self._loaded.get(info.name)
        if known is not None:
            return known
        with self._lock:
            if info.name not in self._loaded:
                self._loaded[info.name] = ModelTokenizer(info.name, Path(info.folder), self._clock)
            return self._loaded[info.name]

    def forget(self, name: str) -> None:
        """Forget a model's tokenizer: another model may be offered under this name."""
        with self._lock:
            self._loaded.pop(name, None)


class ModelTokenizer:
    def __init__(self, name: str, folder: Path, clock: Clock = REAL) -> None:
        import tokenizers

        file = folder / "tokenizer.json"
        if not file.exists():
            raise bad_request(
                f"{name} has no tokenizer.json, so this service cannot turn text into its tokens. "
                "Send tokens instead of text.",
                "no_tokenizer",
            )
        self.name = name
        self.chat = ChatTemplate(folder, clock)
        self._backend: Any = tokenizers.Tokenizer.from_file(str(file))
        # A tokenizer.json may cut or pad texts: right for a classifier, silent damage to a prompt.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = {
            id: token.content for id, token in self._backend.get_added_tokens_decoder().items() if token.special
        }
        self._bytes: dict[int, bytes] = {}
        # Decoding drops the space in front of the first token: a token's own text is what it adds to another token's.
        self._anchor = self.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self.decode(self._anchor)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token: text, or a part of a character. A special token's bytes are its name."""
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._bytes_of(id)
        return known

    def _bytes_of(self, id: int) -> bytes:
        if id in self._special:
            return self._special[id].encode()
        text = self.decode([*self._anchor, id], skip_special_tokens=False)[len(self._anchor_text) :]
        if _REPLACEMENT not in text:
            return text.encode()
        token = self._backend.id_to_token(id)
        if token is None:
            return text.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # how sentencepiece writes a byte
            return bytes([int(token[3:5], 16)])
        if all(letter in _BYTE_OF_LETTER for letter in token):
            return bytes(_BYTE_OF_LETTER[letter] for letter in token)
        return text.encode()


class Detokenizer:
    """Turns tokens into text as they come. The pieces together are the text of all tokens; none has half a character.

    The text of the `context` tokens is not repeated; without them the first word might lose the space before it.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Decoding is not additive (leading spaces, characters over several tokens), so a window of tokens is decoded
        # again each time, and what it adds beyond `_returned` characters is new.
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._returned = len(tokenizer.decode(self._window, skip_special_tokens).rstrip(_REPLACEMENT))

    def push(self, token: int) -> str:
        """Return the text that is certain now; it may be empty."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window, self._skip)
        # Trailing replacement characters may be the start of a character whose other bytes are still to come.
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._returned :]
        self._returned = max(self._returned, len(certain))
        if len(self._window) >= _WINDOW_TOKENS and self._returned == len(text):
            self._shorten(text)
        return piece

    def finish(self) -> str:
        """Return the rest, when no more tokens come."""
        text = self._tokenizer.decode(self._window, self._skip)
        piece = text[self._returned :]
        self._returned = len(text)
        return piece

    def _shorten(self, text: str) -> None:
        """Keep only the last tokens, if their text is the same without the others; inside a character it is not."""
        last = self._window[-_CONTEXT_TOKENS:]
        rest = self._tokenizer.decode(last, self._skip)
        if rest and not rest.startswith(_REPLACEMENT) and text.endswith(rest):
            self._window, self._returned = last, len(rest)


def _byte_of_letter() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    Such a vocabulary writes a byte as the letter of that code if that is visible, else as a letter from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF_LETTER: Final = _byte_of_letter()
