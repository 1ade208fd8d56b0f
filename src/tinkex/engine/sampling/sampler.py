"""The sampler: batches sampling requests, and returns tokens and results as they are ready.

There is one decode batch per base model, for all adapters; batches take turns, one step each. Requests wait until there
is room for them in the KV cache: those of one tenant first come first served, those of different tenants by what each
was charged so far (`row_shares`).
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from tinkex.engine.contract import EngineFault, SampleSpec, checked
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.adapter_cache import AdapterCache, WeightsKey
from tinkex.engine.sampling.decode_batch import ActiveSample, DecodeBatch, Event
from tinkex.engine.sampling.decoder import Decoder
from tinkex.engine.sampling.faults import as_fault
from tinkex.engine.sampling.fill_plan import FillPlan
from tinkex.engine.sampling.prefix_cache import PrefixCache
from tinkex.engine.sampling.prompt_logprobs import PromptLogprobs
from tinkex.engine.sampling.row_shares import PROMPT_TOKENS, Accounts, RowLimits, prompt_token_cost
from tinkex.engine.sampling.stop_strings import StopStrings, load_tokenizer
from tinkex.rules.ranges import check_length, unknown_token_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer


LOOK_STEPS = 32
"""After how many steps rows that were kept for others are looked at again, if nothing else has changed."""


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
        """`models` has every name and alias; `add_model` adds others. `choose_decoder` is called once for each model
        (`runner_choice.choose_decoder`). A batch has `max_rows` rows, and more for tenants with few (`row_shares`).
        All batches together have at most `max_cache_tokens` tokens in their KV caches; the prefix cache has an eighth
        of that in addition."""
        self._models = dict(models)
        self._choose_decoder = choose_decoder
        self._decoders = {model: choose_decoder(model) for model in dict.fromkeys(models.values())}
        self._prefix_cache = PrefixCache(max_cache_tokens // 8)
        self._limits = RowLimits(max_rows, max_cache_tokens)
        self._adapters = AdapterCache(adapters_bytes)
        self._tokenizers: dict[str, Tokenizer] = {}
        self._queues: dict[str, dict[str, dict[int, ActiveSample]]] = {}
        """Requests that wait, by base model, tenant and number, in the order of arrival."""
        self._accounts: dict[str, Accounts] = {}
        """By base model."""
        self._blocked: ActiveSample | None = None
        """The request that waits for memory; no other gets in before it."""
        self._without_weights: ActiveSample | None = None
        """The request that waits for room for its adapter; no other new adapter gets in before it."""
        self._retiring: WeightsKey | None = None
        """The adapter that takes no new requests until the one that `_without_weights` needs is loaded."""
        self._changes = 0
        """Requests that came or left."""
        self._filled: object = None
        """What `_state` was when rows were filled last."""
        self._batches: OrderedDict[str, DecodeBatch] = OrderedDict()
        """By the base model's first name; the one whose turn is next first."""

    def add_model(self, model: Model) -> None:
        self._decoders[model] = self._choose_decoder(model)
        self._models.update(dict.fromkeys(model.info.names, model))

    def uses_model(self, name: str) -> bool:
        """Whether a request for a model waits or runs."""
        return name in self._queues or name in self._batches

    def remove_model(self, name: str) -> None:
        """Forget a model that nothing uses, and what was kept of it for later requests."""
        if (model := self._models.get(name)) is not None:
            self._models = {known: other for known, other in self._models.items() if other is not model}
            del self._decoders[model]
        self._adapters.forget(name)
        self._prefix_cache.forget(lambda prompt: isinstance(prompt.key, tuple) and prompt.key[0].base == name)
        self._tokenizers.pop(name, None)

    @property
    def has_work(self) -> bool:
        return bool(self._queues or self._batches)

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
        key, stop_strings = self._adapters.key_of(spec, model), self._stop_strings(spec, model)
        self._enqueue(ActiveSample(number, spec, key, max_tokens, stop_strings, PromptLogprobs(spec)))

    def cancel(self, number: int) -> None:
        """Drop a request at once, in whatever state it is. No more events of it are returned."""
        waiting = [tenants for queue in self._queues.values() for tenants in queue.values() if number in tenants]
        for samples in waiting:
            self._forget(samples[number])
        with torch.inference_mode():
            for base, batch in list(self._batches.items()):
                batch.drop([sample for sample in batch.samples if sample.number == number])
                if not batch.has_work:
                    self._end_batch(base)
        self._changes += 1

    def step(self) -> list[Event]:
        """Prefill one chunk or decode one token of one batch. Returns the events to send, in order."""
        with torch.inference_mode():
            events = self._fill()
            if self._batches:
                base, batch = next(iter(self._batches.items()))
                self._batches.move_to_end(base)
                self._accounts[base].steps += 1
                events += batch.step()
                if batch.has_prefilled:  # sequences whose prompt is complete start at once
                    events += self._fill()
                if not batch.has_work:
                    self._end_batch(base)
            self._charge_free_rows()
            return events

    # Who gets a row

    def _fill(self) -> list[Event]:
        """Start sequences of the requests in the batches, and move waiting requests into them, while there is room.

        Does nothing unless something has changed: a request came or left, a prompt is complete, a row has ended.
        """
        events: list[Event] = []
        while (state := self._state()) != self._filled:
            self._filled = state
            events += self._admit_blocked()
            for base in dict.fromkeys([*self._batches, *self._queues]):
                events += self._fill_batch(base)
        return events

    def _state(self) -> object:
        """Return what is different if rows may be free now, or if there is more to start."""
        batches = [(len(batch.prefilling), len(batch.starting), len(batch.rows)) for batch in self._batches.values()]
        looks = [self._accounts[base].steps // LOOK_STEPS for base in self._batches]
        return self._changes, batches, looks

    def _fill_batch(self, base: str) -> list[Event]:
        """Give the free rows of a batch away, one by one: the next to the tenant that was charged least so far.

        Of one tenant, sequences of requests in the batch come before requests that wait.
        """
        events: list[Event] = []
        waiting = self._queues.get(base, {})
        accounts = self._accounts.setdefault(base, Accounts())
        plan = FillPlan(base, self._batches, self._limits, accounts)
        turns = [
            (accounts.charged(tenant), plan.next_number(tenant, waiting), tenant)
            for tenant in {**plan.starting, **waiting}
        ]
        heapq.heapify(turns)
        while turns:
            tenant = turns[0][2]
            starting = plan.next_of(tenant)
            if starting is not None:
                is_served = plan.start(starting, keeps_rows_free=self._keeps_rows_free(plan))
                if is_served and plan.counts[starting] + starting.started > 1:  # the first was charged when it came in
                    accounts.serve(tenant, starting.charged)
            elif is_served := tenant in waiting and self._blocked is None:
                faults, is_served = self._admit(next(iter(waiting[tenant].values())), plan)
                events += faults
            if is_served and (tenant in waiting or plan.next_of(tenant) is not None):
                heapq.heapreplace(turns, (accounts.charged(tenant), plan.next_number(tenant, waiting), tenant))
            else:
                heapq.heappop(turns)
        if plan.counts:
            events += self._batches[base].start_rows(plan.counts)
            self._changes += 1  # sequences of one token have ended already
        if base in self._batches:
            # Not the rows of the plan: a sequence that ends with its first token never has one, so none is kept for it.
            accounts.note_rows(Counter(row.sample.tenant for row in self._batches[base].rows))
        return events

    def _admit(self, sample: ActiveSample, plan: FillPlan) -> tuple[list[Event], bool]:
        """Move a waiting request into its batch, if there is room. Returns errors, and whether it waits no longer."""
        if self._batches:
            if not plan.has_rows_for(sample):
                return [], False
            if not self._has_weights(sample):
                self._accounts[plan.base].raise_to_level(sample.tenant)
                return [], False
            # A request larger than the limits runs alone. Later ones must not pass it, or it would wait forever.
            if not plan.has_tokens_for(sample):
                if plan.has_rows_for(sample, may_wait_for_memory=True):
                    self._blocked = sample
                return [], False
        self._forget(sample)  # it waits neither for a row nor for room for its adapter any more
        key = sample.weights_key
        model, accounts = self._models[key.base], self._accounts[key.base]
        try:
            sample.weights = self._adapters.get(model, key, self._used_weights())
            if key.base not in self._batches:
                self._batches[key.base] = DecodeBatch(model, self._decoders[model], self._prefix_cache, accounts)
            self._batches[key.base].add(sample)
        except Exception as error:  # weights that cannot be read fail only the requests that need them
            return [(sample.number, as_fault(error, sample.spec))], True
        most = sample.max_tokens if sample.spec.num_samples else 0
        sample.weight = self._limits.weight(sample.spec, sample.max_length)
        sample.charged = sample.weight * accounts.expected_tokens(sample.tenant, most)
        prompt_cost = (
            (len(sample.spec.prompt) - sample.cache_hit_tokens) * prompt_token_cost(sample.spec) / PROMPT_TOKENS
        )
        accounts.serve(sample.tenant, sample.charged + prompt_cost)
        plan.add(sample, self._batches[key.base])
        return [], True

    # Requests that wait for memory

    def _admit_blocked(self) -> list[Event]:
        """Move the request that waits for memory into its batch as soon as it fits."""
        sample, self._blocked = self._blocked, None
        if sample is None:
            return []
        base = sample.weights_key.base
        return self._admit(sample, FillPlan(base, self._batches, self._limits, self._accounts[base]))[0]

    def _keeps_rows_free(self, plan: FillPlan) -> bool:
        """Whether a request waits for memory that is free as soon as sequences that run end, and none start.

        If the prompts in the batches leave too little for it, their sequences have to start, or all would wait.
        """
        if self._blocked is None:
            return False
        key = self._blocked.weights_key
        reserved = {base: batch.reserved for base, batch in self._batches.items()}
        rows, longest = reserved.pop(key.base, (0, 0))
        tokens = (rows + self._blocked.extra_rows) * max(longest, self._blocked.max_length)
        tokens += sum(count * width for count, width in reserved.values())
        return self._limits.has_tokens(tokens, may_spare=False)

    def _charge_free_rows(self) -> None:
        """Charge the tenant of a request that waits for memory for the rows that are kept free for it."""
        if self._blocked is not None:
            base = self._blocked.weights_key.base
            running = sum(len(batch.rows) for batch in self._batches.values())
            self._accounts[base].charge(self._blocked.tenant, max(self._limits.max_rows - running, 0))

    # Requests that wait for adapters

    def _used_weights(self) -> Counter[WeightsKey]:
        """Return the weights in use, and by how many requests."""
        return Counter(sample.weights_key for batch in self._batches.values() for sample in batch.samples)

    def _has_weights(self, sample: ActiveSample) -> bool:
        """Whether a request's adapter is in memory or fits.

        If it does not, the adapter with the fewest requests takes no new ones until this request has its own.
        """
        key, used = sample.weights_key, self._used_weights()
        if key.folder is None:
            return True
        first = self._without_weights
        if first is None or first is sample:
            if key in used or self._adapters.has_room(used):
                self._without_weights = self._retiring = None
                return True
            self._without_weights = sample
            if self._retiring not in used:
                self._retiring = min((name for name in used if name.folder is not None), key=lambda name: used[name])
            return False
        return key in used and key != self._retiring

    # The queue

    def _enqueue(self, sample: ActiveSample) -> None:
        base, tenant = sample.weights_key.base, sample.tenant
        queue = self._queues.setdefault(base, {})
        if tenant not in queue:
            starting = self._batches[base].starting if base in self._batches else ()
            accounts = self._accounts.setdefault(base, Accounts())
            accounts.enter(tenant, {*queue, *(row.tenant for row in starting)})
        queue.setdefault(tenant, {})[sample.number] = sample
        self._changes += 1

    def _forget(self, sample: ActiveSample) -> None:
        """Remove a request that waits."""
        self._leave_queue(sample)
        if sample is self._blocked:
            self._blocked = None
        if sample is self._without_weights:
            self._without_weights = self._retiring = None

    def _end_batch(self, base: str) -> None:
        del self._batches[base]
        if base in self._queues:
            self._accounts[base].forget(self._queues[base])
        else:
            self._accounts.pop(base, None)
        self._changes += 1

    def _leave_queue(self, sample: ActiveSample) -> None:
        base, tenant = sample.weights_key.base, sample.tenant
        del self._queues[base][tenant][sample.number]
        if not self._queues[base][tenant]:
            del self._queues[base][tenant]
        if not self._queues[base]:
            del self._queues[base]
        self._changes += 1

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
