"""The sampler: takes sampling requests, runs them in decode batches, and gives out tokens and answers as they come.

One batch per base model, for all adapters; batches take turns, one step each. Requests wait, first come first served,
until there is room for them. Weights are read from their folders when they are needed and never touch what is being
trained.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from tinkex.engine.adapters.checkpoint import WEIGHTS, read_weights
from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.contract import EngineFault, SampleSpec
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.runner_choice import decoder_for
from tinkex.engine.sampling.decode_batch import DecodeBatch, Event, Request, as_fault
from tinkex.engine.sampling.prefix_cache import PromptCache
from tinkex.engine.sampling.prompt_logprobs import PromptScores
from tinkex.engine.sampling.stop_strings import StopStrings, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class WeightsKey(NamedTuple):
    """Which weights: the model's first name, the folder of an adapter, and its files.

    A folder may be deleted and written again: its name alone does not say what is in it.
    """

    base: str
    weights: str | None
    written: tuple[int, int] | None
    """The number and time of the file with the weights; None if there is none."""


class Sampler:
    """All sampling of one engine. One thread; `step` while it `has_work`."""

    def __init__(
        self,
        models: Mapping[str, Model],
        *,
        max_rows: int = 64,
        max_cache_tokens: int = 131072,
        adapters_bytes: int = 1 << 30,
        runner: str = "auto",
        weights: str = "float32",
    ) -> None:
        """`models` by every name. A batch has `max_rows` rows; all batches have `max_cache_tokens` tokens together, and
        prompts that were read are kept within an eighth of that besides. `weights`: what is sampled with, one of
        `packed.formats.FORMATS`."""
        self._models = models
        self._decoders = {model: decoder_for(model, runner, weights) for model in dict.fromkeys(models.values())}
        self._prompts = PromptCache(max_cache_tokens // 8)
        self._max_rows = max_rows
        self._max_cache_tokens = max_cache_tokens
        self._adapters = AdapterCache(adapters_bytes)
        self._tokenizers: dict[str, Tokenizer] = {}
        self._waiting: dict[int, tuple[WeightsKey, Request]] = {}
        self._batches: OrderedDict[str, DecodeBatch] = OrderedDict()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._batches)

    @property
    def cache_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(batch.cache_bytes for batch in self._batches.values())

    def add(self, number: int, spec: SampleSpec) -> None:
        """Take a request. Raises EngineFault if it can never run; any later trouble comes out of `step`."""
        model = self._models.get(spec.base)
        if model is None:
            raise EngineFault(f"The engine has no model {spec.base}.")
        check(spec, model)
        most = max(spec.max_tokens, 0)
        if model.info.max_context_length > 0:
            most = min(most, max(model.info.max_context_length - len(spec.prompt), 0))
        request = Request(number, spec, most, self._stops(spec, model), PromptScores(spec))
        key = self._adapters.key_of(spec, model)
        # What was read is its party's alone, also with the base model: an answer tells how much of a prompt was known,
        # and whoever may ask often could read another's prompt out of that, token by token.
        request.key = (key, spec.party)
        self._waiting[number] = key, request

    def cancel(self, number: int) -> None:
        """Forget a request at once, wherever it is. Nothing more is said about it."""
        self._waiting.pop(number, None)
        with torch.inference_mode():
            for base, batch in list(self._batches.items()):
                batch.drop([request for request in batch.requests if request.number == number])
                if not batch.has_work:
                    del self._batches[base]

    def step(self) -> list[Event]:
        """Prefill one chunk or decode one token of one batch. What came of it is ready to be sent, in order."""
        with torch.inference_mode():
            # Sequences of requests that run already come before those of requests that wait.
            events = [event for base, batch in self._batches.items() for event in batch.start(self._room_of(base))]
            events += self._admit()
            if self._batches:
                base, batch = next(iter(self._batches.items()))
                self._batches.move_to_end(base)
                events += batch.step(self._room_of(base))
                if not batch.has_work:
                    del self._batches[base]
            return events

    def _admit(self) -> list[Event]:
        """Let requests into their batches, in the order in which they came, as long as there is room."""
        events: list[Event] = []
        full: set[str] = set()
        used = {self._key(request) for batch in self._batches.values() for request in batch.requests}
        for key, request in list(self._waiting.values()):
            model, base = self._models[key.base], key.base
            if base in full:
                continue
            if base in self._batches and self._batches[base].load[0] >= self._max_rows:
                full.add(base)  # other batches need not wait for this one
                continue
            # A request that is too large for the bounds runs alone. Nobody overtakes it, or it would wait forever.
            has_weights = key.weights is None or key in used or self._adapters.has_room(used)
            if self._batches and not (has_weights and self._room(base, request.length) >= request.places):
                break
            del self._waiting[request.number]
            try:
                request.weights = self._adapters.get(model, key, used)
                if base not in self._batches:
                    self._batches[base] = DecodeBatch(model, self._decoders[model], self._prompts)
                self._batches[base].add(request)
                used.add(key)
            except Exception as error:  # unreadable weights are the trouble of those who ask for them
                events.append((request.number, as_fault(error, request)))
        return events

    @staticmethod
    def _key(request: Request) -> WeightsKey:
        assert isinstance(request.key, tuple)
        key: WeightsKey = request.key[0]
        return key

    def _room_of(self, base: str) -> Callable[[Request], int]:
        return lambda request: self._room(base, request.length)

    def _room(self, base: str, length: int) -> int:
        """How many more rows of that length fit; below 0 if too many run.

        Rows are padded to the longest one of their batch, and are counted so.
        """
        loads = {other: batch.load for other, batch in self._batches.items()}
        rows, longest = loads.pop(base, (0, 0))
        free = self._max_cache_tokens - sum(count * width for count, width in loads.values())
        return min(self._max_rows, free // max(longest, length)) - rows

    def _stops(self, spec: SampleSpec, model: Model) -> Callable[[], StopStrings] | None:
        strings = [string for string in spec.stop_strings if string]
        if not strings:
            return None
        name = model.info.name
        if name not in self._tokenizers:
            self._tokenizers[name] = load_tokenizer(model.info.folder, name)
        return partial(StopStrings, self._tokenizers[name], strings, spec.prompt)


class AdapterCache:
    """Weights that were read: those in use, and the last used ones as long as all stay within a number of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[WeightsKey, tuple[LoraWeights, int]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self._kept.values())

    def key_of(self, spec: SampleSpec, model: Model) -> WeightsKey:
        """What a request needs. Weights that were read stay usable when their folder is gone."""
        key = WeightsKey(model.info.name, spec.weights, None)
        if spec.weights is None:
            return key
        try:
            found = os.stat(os.path.join(spec.weights, WEIGHTS))
        except OSError:
            return next((kept for kept in reversed(self._kept) if kept[:2] == key[:2]), key)
        return key._replace(written=(found.st_ino, found.st_mtime_ns))

    def has_room(self, used: Collection[WeightsKey]) -> bool:
        """False if those in use fill it."""
        return sum(size for key, (_, size) in self._kept.items() if key in used) < self._limit_bytes

    def get(self, model: Model, key: WeightsKey, used: Collection[WeightsKey]) -> LoraWeights | None:
        if key.weights is None:
            return None
        if key not in self._kept:
            weights = read_weights(key.weights, model)
            self._kept[key] = weights, sum(down.nbytes + up.nbytes for down, up in weights.pairs.values())
        self._kept.move_to_end(key)
        for old in [old for old in self._kept if old != key and old not in used]:
            if self.nbytes <= self._limit_bytes:
                break
            del self._kept[old]
        return self._kept[key][0]


def check(spec: SampleSpec, model: Model) -> None:
    """Refuse what would fail half-way, or take the process down with it (as a wrong index does on a GPU)."""
    size, context = len(spec.prompt), model.info.max_context_length
    if not size:
        raise EngineFault("The prompt is empty. Give at least one token, such as the model's first one.")
    if 0 < context < size:
        raise EngineFault(f"The prompt has {size} tokens, but {model.info.name} takes {context} at most. Shorten it.")
    tokens = (token for row in (spec.prompt, *(spec.targets or ())) for token in row)
    wrong = next((token for token in tokens if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        raise EngineFault(
            f"Token {wrong} is not in the vocabulary of {model.info.name} (0 to {model.vocab_size - 1}). "
            "Encode the text with this model's own tokenizer."
        )
    if spec.targets is not None and len(spec.targets) != size - 1:
        raise EngineFault(
            f"Targets are given for {len(spec.targets)} positions, but a prompt of {size} tokens has {size - 1} "
            "after the first. Give one row for each of those; it may be empty."
        )
    if getattr(model.module, "_is_stateful", False):
        raise EngineFault(
            f"{model.info.name} keeps a running state instead of keys and values, which this sampler cannot batch. "
            "Train it here and sample elsewhere, or choose a model with attention in every layer."
        )
