"""Prompts that were read, and those that were read before: what two have in common is computed once.

Kept are the last used ones, within a number of tokens. A prompt serves requests of the same weights and the same tenant
alone.

Axes: V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import takewhile

from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.sampling.kv_cache import RowCache

WORTH_IT = 16
"""Tokens in common below which nothing is copied."""
OVERHEAD = 64
"""What a kept prompt counts besides its tokens: its logits, and columns of its cache that are not used."""


class Prompt:
    """Tokens, and their keys and values as far as they are read."""

    def __init__(self, key: Hashable, tokens: tuple[int, ...], weights: LoraWeights | None) -> None:
        self.key, self.tokens, self.weights = key, tokens, weights
        self.cache = RowCache()
        self.at = 0
        """So many tokens are read."""
        self.logits_1V: Tensor | None = None
        """Those that the first token of every sequence is drawn from."""
        self.is_shared = False
        """Whether several requests have it."""

    @property
    def is_read(self) -> bool:
        return self.logits_1V is not None

    def same_as(self, other: Prompt) -> bool:
        return self.key == other.key and self.tokens == other.tokens


class PromptCache:
    """The last used prompts."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._kept: OrderedDict[tuple[Hashable, tuple[int, ...]], Prompt] = OrderedDict()

    @property
    def tokens(self) -> int:
        return sum(len(tokens) + OVERHEAD for _, tokens in self._kept)

    @property
    def nbytes(self) -> int:
        return sum(prompt.cache.nbytes for prompt in self._kept.values())

    def find(self, wanted: Prompt) -> Prompt:
        """The same prompt if it is known; else `wanted`, with what it has in common with a known one."""
        name = (wanted.key, wanted.tokens)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        most, best = 0, None
        for prompt in self._kept.values():
            if prompt.key == wanted.key and (count := common(prompt.tokens, wanted.tokens)) > most:
                most, best = count, prompt
        # The last token is always read: the next one is drawn from its hidden state.
        most = min(most, len(wanted.tokens) - 1)
        if best is not None and most >= WORTH_IT:
            wanted.cache, wanted.at = best.cache.head(most), most
        return wanted

    def keep(self, prompt: Prompt) -> None:
        if len(prompt.tokens) < WORTH_IT or len(prompt.tokens) + OVERHEAD > self._limit_tokens:
            return
        self._kept[prompt.key, prompt.tokens] = prompt
        while self.tokens > self._limit_tokens:
            self._kept.popitem(last=False)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two begin with alike."""
    if one[:WORTH_IT] != other[:WORTH_IT]:  # most have little in common
        return 0
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
