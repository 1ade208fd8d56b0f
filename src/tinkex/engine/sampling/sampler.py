"""The sampler: batches sampling requests, and returns tokens and results as they are ready.

There is one decode batch per base model, for all adapters; batches take turns, one step each. Requests wait, first come
first served, until there is room for them in the KV cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from tinkex.engine.contract import EngineFault, SampleSpec, checked
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.adapter_cache import AdapterCache
from tinkex.engine.sampling.decode_batch import ActiveSample, DecodeBatch, Event, as_fault
from tinkex.engine.sampling.decoder import Decoder
from tinkex.engine.sampling.prefix_cache import PrefixCache
from tinkex.engine.sampling.prompt_logprobs import PromptLogprobs
from tinkex.engine.sampling.stop_strings import StopStrings, load_tokenizer
from tinkex.rules.limits import check_length, unknown_token_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Sampler:
    """All sampling of one engine, on one thread. Call `step` while it `has_work`."""

    def __init__(
        self,
        models: Mapping[str, Model],
        *,
        choose_decoder: Callable[[Model], Decoder],
        max_rows: int = 64,
        max_cache_tokens: int = 131072,
        adapters_bytes: int = 1 << 30,
    ) -> None:
        """`models` has every name and alias. `choose_decoder` is called once for each model
        (`runner_choice.choose_decoder`). A batch has at most `max_rows` rows. All batches together have at most
        `max_cache_tokens` tokens in their KV caches; the prefix cache has an eighth of that in addition."""
        self._models = models
        self._decoders = {model: choose_decoder(model) for model in dict.fromkeys(models.values())}
        self._prefix_cache = PrefixCache(max_cache_tokens // 8)
        self._max_rows = max_rows
        self._max_cache_tokens = max_cache_tokens
        self._adapters = AdapterCache(adapters_bytes)
        self._tokenizers: dict[str, Tokenizer] = {}
        self._waiting: dict[int, ActiveSample] = {}
        self._batches: OrderedDict[str, DecodeBatch] = OrderedDict()
        """By the base model's first name; the one whose turn is next first."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._batches)

    @property
    def cache_bytes(self) -> int:
        return sum(batch.cache_bytes for batch in self._batches.values())

    def add(self, number: int, spec: SampleSpec) -> None:
        """Queue a request. Raises EngineFault if it can never run; `step` returns later errors."""
        model = self._models.get(spec.base)
        if model is None:
            raise EngineFault(f"The engine has no model {spec.base}.")
        check_sample(spec, model)
        max_tokens = max(spec.max_tokens, 0)
        if model.info.max_context_length > 0:
            max_tokens = min(max_tokens, max(model.info.max_context_length - len(spec.prompt), 0))
        self._waiting[number] = ActiveSample(
            number,
            spec,
            self._adapters.key_of(spec, model),
            max_tokens,
            self._stop_strings(spec, model),
            PromptLogprobs(spec),
        )

    def cancel(self, number: int) -> None:
        """Drop a request at once, in whatever state it is. No more events of it are returned."""
        self._waiting.pop(number, None)
        with torch.inference_mode():
            for base, batch in list(self._batches.items()):
                batch.drop([sample for sample in batch.samples if sample.number == number])
                if not batch.has_work:
                    del self._batches[base]

    def step(self) -> list[Event]:
        """Prefill one chunk or decode one token of one batch. Returns the events to send, in order."""
        with torch.inference_mode():
            # Sequences of requests that are in a batch come before those of requests that wait.
            events = [event for base, batch in self._batches.items() for event in batch.start_rows(self._room_in(base))]
            events += self._admit()
            if self._batches:
                base, batch = next(iter(self._batches.items()))
                self._batches.move_to_end(base)
                events += batch.step(self._room_in(base))
                if not batch.has_work:
                    del self._batches[base]
            return events

    def _admit(self) -> list[Event]:
        """Move waiting requests into their batches, in the order of their arrival, as long as there is room."""
        events: list[Event] = []
        full: set[str] = set()
        used = {sample.weights_key for batch in self._batches.values() for sample in batch.samples}
        for sample in list(self._waiting.values()):
            key = sample.weights_key
            model, base = self._models[key.base], key.base
            if base in full:
                continue
            if base in self._batches and self._batches[base].load[0] >= self._max_rows:
                full.add(base)  # other batches need not wait for this one
                continue
            # A request larger than the limits runs alone. Later ones must not pass it, or it would wait forever.
            has_weights = key.folder is None or key in used or self._adapters.has_room(used)
            if self._batches and not (has_weights and self._free_rows(base, sample.max_length) >= sample.extra_rows):
                break
            del self._waiting[sample.number]
            try:
                sample.weights = self._adapters.get(model, key, used)
                if base not in self._batches:
                    self._batches[base] = DecodeBatch(model, self._decoders[model], self._prefix_cache)
                self._batches[base].add(sample)
                used.add(key)
            except Exception as error:  # weights that cannot be read fail only the requests that need them
                events.append((sample.number, as_fault(error, sample)))
        return events

    def _room_in(self, base: str) -> Callable[[ActiveSample], int]:
        return lambda sample: self._free_rows(base, sample.max_length)

    def _free_rows(self, base: str, length: int) -> int:
        """Return how many more rows of that length fit into a batch; below 0 if too many run already.

        Rows are padded to the longest row of their batch, and are counted with the padding.
        """
        loads = {name: batch.load for name, batch in self._batches.items()}
        rows, longest = loads.pop(base, (0, 0))
        free_tokens = self._max_cache_tokens - sum(count * width for count, width in loads.values())
        return min(self._max_rows, free_tokens // max(longest, length)) - rows

    def _stop_strings(self, spec: SampleSpec, model: Model) -> Callable[[], StopStrings] | None:
        strings = [string for string in spec.stop_strings if string]
        if not strings:
            return None
        name = model.info.name
        if name not in self._tokenizers:
            self._tokenizers[name] = load_tokenizer(model.info.folder, name)
        return partial(StopStrings, self._tokenizers[name], strings, spec.prompt)


def check_sample(spec: SampleSpec, model: Model) -> None:
    """Reject requests that would fail half-way, or crash the process (as a wrong index does on a GPU)."""
    size, info = len(spec.prompt), model.info
    checked(check_length, "prompt", size, info.name, info.max_context_length or None)
    for where, row in (("prompt", spec.prompt), *(("target_prompt_logprobs", row) for row in spec.targets or ())):
        for position, token in enumerate(row):
            if not 0 <= token < model.vocab_size:
                raise EngineFault(str(unknown_token_error(where, position, token, info.name, model.vocab_size)))
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
