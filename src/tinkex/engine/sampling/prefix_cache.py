"""Prefix cache: the keys and values of recent prompts, so that the shared prefix of two prompts is computed once.

The least recently used prompts are dropped above a number of tokens. A prompt serves only requests with the same
weights and of the same tenant.

Axes: V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import takewhile

from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.sampling.kv_cache import KVCache

MIN_PREFIX_TOKENS = 16
"""A shorter shared prefix is not worth a copy, and a shorter prompt is not cached."""
OVERHEAD_TOKENS = 64
"""What a cached prompt counts besides its tokens: its logits, and columns of its KV cache that are not used."""


class CachedPrompt:
    """The tokens of a prompt, and the keys and values of those that are prefilled."""

    def __init__(self, key: Hashable, tokens: tuple[int, ...], weights: LoraWeights | None) -> None:
        self.key, self.tokens, self.weights = key, tokens, weights
        self.cache = KVCache()
        self.prefilled = 0
        """How many tokens are in the cache."""
        self.logits_1V: Tensor | None = None
        """The logits of its last token, from which the first token of every sequence is drawn."""
        self.is_shared = False
        """Whether several requests have it."""

    @property
    def is_complete(self) -> bool:
        return self.logits_1V is not None

    def matches(self, prompt: CachedPrompt) -> bool:
        return self.key == prompt.key and self.tokens == prompt.tokens


class PrefixCache:
    """The most recently used prompts."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._prompts: OrderedDict[tuple[Hashable, tuple[int, ...]], CachedPrompt] = OrderedDict()

    @property
    def tokens(self) -> int:
        return sum(len(tokens) + OVERHEAD_TOKENS for _, tokens in self._prompts)

    def lookup(self, prompt: CachedPrompt) -> CachedPrompt:
        """Return the same prompt if it is cached; else `prompt` itself, with the longest cached prefix copied in."""
        name = (prompt.key, prompt.tokens)
        if name in self._prompts:
            self._prompts.move_to_end(name)
            return self._prompts[name]
        longest, best = 0, None
        for cached in self._prompts.values():
            if cached.key == prompt.key and (length := common_prefix(cached.tokens, prompt.tokens)) > longest:
                longest, best = length, cached
        # The last token is always computed: the next one is drawn from its hidden state.
        longest = min(longest, len(prompt.tokens) - 1)
        if best is not None and longest >= MIN_PREFIX_TOKENS:
            prompt.cache, prompt.prefilled = best.cache.copy_prefix(longest), longest
        return prompt

    def forget(self, is_unwanted: Callable[[CachedPrompt], bool]) -> None:
        for name in [name for name, prompt in self._prompts.items() if is_unwanted(prompt)]:
            del self._prompts[name]

    def insert(self, prompt: CachedPrompt) -> None:
        """Cache a prompt that is prefilled, and drop the least recently used ones above the limit."""
        if len(prompt.tokens) < MIN_PREFIX_TOKENS or len(prompt.tokens) + OVERHEAD_TOKENS > self._limit_tokens:
            return
        self._prompts[prompt.key, prompt.tokens] = prompt
        while self.tokens > self._limit_tokens:
            self._prompts.popitem(last=False)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two prompts share from the start; 0 if fewer than are worth a copy."""
    if left[:MIN_PREFIX_TOKENS] != right[:MIN_PREFIX_TOKENS]:  # rejects most pairs quickly
        return 0
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
