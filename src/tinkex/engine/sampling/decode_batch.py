"""One decode batch: sampling requests of one base model, with any adapters. Requests join and leave between steps.

A request passes through three stages:

    prefilling   its prompt is computed in chunks into a KV cache of its own, once for all requests with that prompt
    starting     its prompt is complete; its sequences start as rows of the batch as soon as there is room
    rows         one row per sequence; every decode step draws one token of every row

A row has a copy of the prompt's keys and values in the batch's cache, or reads the prompt's own cache. The caller
(`Sampler`) decides how many rows there is room for.

Axes: B rows of the batch, N some of the rows, K ranked tokens, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.contract import EngineFault, Sampled, SampleEvent, SampleSpec, SequenceOutput, Tokens
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.adapter_cache import WeightsKey
from tinkex.engine.sampling.decoder import Decoder, PromptChunk, RowInput
from tinkex.engine.sampling.faults import as_fault
from tinkex.engine.sampling.kv_cache import KVCache
from tinkex.engine.sampling.next_token import TokenSampler, rank_tokens, sample_next_tokens
from tinkex.engine.sampling.prefix_cache import CachedPrompt, PrefixCache
from tinkex.engine.sampling.prompt_logprobs import PromptLogprobs, divergence_fault
from tinkex.engine.sampling.row_shares import Accounts, chunk_sizes
from tinkex.engine.sampling.stop_strings import StopStrings
from tinkex.types.sampling import TopkLogprobs

CHUNK_TOKENS = 512
"""Prompt tokens prefilled in one step. Larger products are hardly faster, and all other requests wait for them."""
CHUNK_DIVISOR = 4
"""While rows wait for their next token, a chunk is smaller by this factor."""
MIN_SHARED_TOKENS = 64
"""Rows read a shared prompt of at least so many tokens in place. A shorter one is copied: a second attention call costs
more than the copy."""

Event = tuple[int, SampleEvent | EngineFault]
"""A request's number, and its new tokens, its result or its error."""


@dataclass(slots=True, eq=False)
class ActiveSample:
    """A sampling request in progress."""

    number: int
    spec: SampleSpec
    weights_key: WeightsKey
    max_tokens: int
    """The most tokens of a sequence: as requested, or as the model's context leaves."""
    make_stop_strings: Callable[[], StopStrings] | None
    """Makes the stop-string watcher of one sequence, if there are stop strings."""
    prompt_logprobs: PromptLogprobs
    weights: LoraWeights | None = None
    prompt: CachedPrompt | None = None
    """None once the last sequence has started."""
    cache_hit_tokens: int = 0
    """Tokens of the prompt that had been computed for another request."""
    started: int = 0
    """Sequences that have become rows."""
    weight: float = 1.0
    """What a token of one row costs the tenant."""
    charged: float = 0.0
    """What each sequence is charged when it gets its row; the first when the request gets into the batch."""
    finished: dict[int, SequenceOutput] = field(default_factory=dict)

    @property
    def prefix_key(self) -> tuple[WeightsKey, str]:
        """Which prompts in the prefix cache this request may use.

        Only those of its own tenant, also with the base model: a result says how much of its prompt was cached, and a
        tenant that may ask often could read the prompt of another out of that, token by token.
        """
        return (self.weights_key, self.spec.tenant)

    @property
    def max_length(self) -> int:
        """The most tokens of one row, prompt included."""
        return len(self.spec.prompt) + self.max_tokens

    @property
    def unstarted(self) -> int:
        """Sequences that are not rows yet."""
        return self.spec.num_samples - self.started

    @property
    def extra_rows(self) -> int:
        """Rows of the cache to reserve besides its rows: one for the prompt, and one for the first row if the prompt is
        needed after that."""
        return 2 if self.spec.num_samples > 1 and not self.started else 1

    @property
    def tenant(self) -> str:
        return self.spec.tenant

    def result(self) -> Sampled:
        return Sampled(
            sequences=[self.finished[index] for index in range(self.spec.num_samples)],
            prompt_logprobs=self.prompt_logprobs.logprobs,
            topk_prompt=self.prompt_logprobs.topk,
            targets=self.prompt_logprobs.packed_targets,
            alternatives=self.prompt_logprobs.alternatives,
            cache_hit_tokens=self.cache_hit_tokens,
            prompt_tokens=len(self.spec.prompt),
        )


class DrawnToken(NamedTuple):
    """One drawn token, with the most likely ones if they are requested."""

    token: int
    logprob: float
    topk: tuple[bytes, bytes] | None
    """Tokens as int32 and log-probabilities as float32."""


class Row:
    """One sequence of a request."""

    def __init__(self, sample: ActiveSample, index: int, model: Model) -> None:
        self.sample = sample
        self.spec = sample.spec
        self.index = index
        self.token_sampler = TokenSampler(sample.spec, index, model.vocab_size, model.device)
        self.computed_tokens = len(sample.spec.prompt)
        """Tokens whose keys and values are computed; the last drawn token is not among them."""
        self.prefix: CachedPrompt | None = None
        """The prompt, if the row reads its cache instead of a copy."""
        self._stop_strings = sample.make_stop_strings() if sample.make_stop_strings else None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.wants_topk = sample.spec.topk_sample > 0
        self._topk = (bytearray(), bytearray())
        """The likeliest tokens at every position and their log-probabilities, packed."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of this row in the batch's own cache."""
        return self.computed_tokens - (0 if self.prefix is None else self.prefix.prefilled)

    def next_input(self) -> RowInput:
        prefix = None if self.prefix is None else self.prefix.cache
        return RowInput(self.tokens[-1], self.computed_tokens, self.cached_tokens, self.sample.weights, prefix)

    def add_token(self, drawn: DrawnToken) -> str | None:
        """Append a drawn token. Returns the stop reason if the sequence ends with it, else None."""
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if drawn.topk is not None:
            for packed, new in zip(self._topk, drawn.topk, strict=True):
                packed += new
        self.token_sampler.record_token(drawn.token)
        has_stop_string = self._stop_strings is not None and self._stop_strings.add_token(drawn.token)
        if drawn.token in self.spec.stop_tokens or has_stop_string:
            return "stop"
        return "length" if len(self.tokens) >= self.sample.max_tokens else None

    def finish(self, reason: str) -> None:
        topk, length = None, len(self.tokens)
        if self.wants_topk:
            tokens, logprobs = map(bytes, self._topk)
            topk = TopkLogprobs.from_buffers(tokens, logprobs, length, len(tokens) // 4 // max(length, 1))
        self.sample.finished[self.index] = SequenceOutput(
            tokens=self.tokens, logprobs=self.logprobs, stop_reason=reason, topk=topk
        )


class DecodeBatch:
    """The requests of one base model.

    Invariant: `rows[i]` is row i of the KV cache. Rows that read a shared prompt have only their own tokens there.
    """

    def __init__(self, model: Model, decoder: Decoder, prefix_cache: PrefixCache, accounts: Accounts) -> None:
        self.model = model
        self._accounts = accounts
        self._decoder = decoder
        self._prefix_cache = prefix_cache
        self._cache = KVCache()
        self.has_prefilled = False
        """Whether the last step was one of prompts, so that sequences may be ready to start."""
        self.prefilling: deque[CachedPrompt] = deque()
        self._waiting: dict[CachedPrompt, list[ActiveSample]] = {}
        """The requests that wait for a prompt in `prefilling`."""
        self.starting: deque[ActiveSample] = deque()
        """The requests whose prompt is complete and that have sequences left to start."""
        self.rows: list[Row] = []

    @property
    def has_work(self) -> bool:
        return bool(self.prefilling or self.starting or self.rows)

    @property
    def prefilling_samples(self) -> list[ActiveSample]:
        return [sample for samples in self._waiting.values() for sample in samples]

    @property
    def samples(self) -> list[ActiveSample]:
        """All requests in the batch, each once."""
        return list(dict.fromkeys([*self.prefilling_samples, *self.starting, *(row.sample for row in self.rows)]))

    @property
    def load(self) -> tuple[int, int]:
        """The number of rows, with those reserved for prompts, and the most tokens that any of them may reach."""
        reserved, longest = self.reserved
        return len(self.rows) + reserved, max([longest, *(row.sample.max_length for row in self.rows)])

    @property
    def reserved(self) -> tuple[int, int]:
        """The same without the rows that run."""
        with_prompt = [*self.prefilling_samples, *self.starting]
        lengths = [sample.max_length for sample in with_prompt]
        return sum(sample.extra_rows for sample in with_prompt), max(lengths, default=0)

    @property
    def cache_bytes(self) -> int:
        prompts = {*self.prefilling, *(sample.prompt for sample in self.starting), *(row.prefix for row in self.rows)}
        return self._cache.nbytes + sum(prompt.cache.nbytes for prompt in prompts if prompt is not None)

    def add(self, sample: ActiveSample) -> None:
        """Add a request. A cached prompt is not computed again, nor is the prefix that it shares with a cached one."""
        prompt = CachedPrompt(sample.prefix_key, sample.spec.prompt, sample.weights)
        if sample.prompt_logprobs.is_requested:  # needs every hidden state, so the whole prompt must be computed
            sample.prompt = prompt
        else:
            in_progress = next((queued for queued in self.prefilling if queued.matches(prompt)), None)
            sample.prompt = in_progress or self._prefix_cache.lookup(prompt)
            sample.cache_hit_tokens = len(prompt.tokens) if in_progress is not None else sample.prompt.prefilled
            if in_progress is not None:
                in_progress.is_shared = True
        if sample.prompt.is_complete:
            sample.prompt.is_shared = True
            self.starting.append(sample)
            return
        if sample.prompt not in self._waiting:
            self.prefilling.append(sample.prompt)
        self._waiting.setdefault(sample.prompt, []).append(sample)

    def step(self) -> list[Event]:
        """Prefill one chunk, or decode one token of every row; alternates if both have work."""
        self.has_prefilled = bool(self.prefilling) and not (self.rows and self.has_prefilled)
        if self.has_prefilled:
            return self._prefill()
        return self._decode() if self.rows else []

    def drop(self, samples: Iterable[ActiveSample]) -> None:
        """Remove requests, in whatever stage they are."""
        dropped = set(samples)
        for prompt, waiting in list(self._waiting.items()):
            self._waiting[prompt] = [sample for sample in waiting if sample not in dropped]
            if not self._waiting[prompt]:
                del self._waiting[prompt]
                self.prefilling.remove(prompt)
        self.starting = deque(sample for sample in self.starting if sample not in dropped)
        self._remove_rows([row for row in self.rows if row.sample in dropped])

    # Prompts

    def _prefill(self) -> list[Event]:
        """Compute one chunk's worth of prompt tokens: part of a long prompt, or several short ones."""
        chunks = self._next_chunks()
        hidden: list[Tensor | None] = [None] * len(chunks)
        try:
            hidden[:] = self._decoder.prefill([chunk for _, chunk in chunks])
        except Exception as error:
            if len(chunks) == 1:
                return self._fail_prompt(chunks[0][0], error)
        events: list[Event] = []
        last_hidden: dict[CachedPrompt, Tensor] = {}
        for (prompt, chunk), hidden_TD in zip(chunks, hidden, strict=True):
            try:
                if hidden_TD is None:  # they failed together: run one by one, so that only the cause of it fails
                    prompt.cache.truncate(prompt.prefilled)
                    (hidden_TD,) = self._decoder.prefill([chunk])
                for sample in self._waiting[prompt]:
                    unembed = partial(self._unembed, sample.weights)
                    sample.prompt_logprobs.add_hidden(hidden_TD, prompt.prefilled, unembed, self.model.vocab_size)
            except Exception as error:  # fails the requests of this prompt only
                events += self._fail_prompt(prompt, error)
                continue
            prompt.prefilled += hidden_TD.shape[0]
            if prompt.prefilled == len(prompt.tokens):
                last_hidden[prompt] = hidden_TD[-1:]
            else:  # a long prompt goes behind the others
                self.prefilling.remove(prompt)
                self.prefilling.append(prompt)
        self._complete_prompts(last_hidden)
        return events

    def _next_chunks(self) -> list[tuple[CachedPrompt, PromptChunk]]:
        """Return the next tokens of the first prompts in the queue, up to the size of a chunk together."""
        budget = max(1, CHUNK_TOKENS // CHUNK_DIVISOR) if self.rows else CHUNK_TOKENS
        left = [(self._waiting[prompt][0].spec, len(prompt.tokens) - prompt.prefilled) for prompt in self.prefilling]
        chunks: list[tuple[CachedPrompt, PromptChunk]] = []
        for prompt, size in zip(self.prefilling, chunk_sizes(left, budget), strict=True):
            if size:
                tokens = prompt.tokens[prompt.prefilled : prompt.prefilled + size]
                chunks.append((prompt, PromptChunk(prompt.cache, prompt.prefilled, tokens, prompt.weights)))
        return chunks

    def _complete_prompts(self, last_hidden: Mapping[CachedPrompt, Tensor]) -> None:
        """Move the requests of prefilled prompts to `starting`, with the logits of the last token for all at once."""
        drawing = [prompt for prompt in last_hidden if any(sample.max_tokens > 0 for sample in self._waiting[prompt])]
        if drawing:
            hidden_ND = torch.cat([last_hidden[prompt] for prompt in drawing])
            logits_NV = self._decoder.logits(hidden_ND, [prompt.weights for prompt in drawing])
            for prompt, logits_1V in zip(drawing, torch.split(logits_NV, 1), strict=True):
                prompt.logits_1V = logits_1V.clone()  # a view would keep the logits of all prompts in memory
                self._prefix_cache.insert(prompt)
        for prompt in last_hidden:
            prompt.weights = None  # a cached prompt must not keep its adapter in memory
            self.prefilling.remove(prompt)
            self.starting += self._waiting.pop(prompt)

    def _fail_prompt(self, prompt: CachedPrompt, error: Exception) -> list[Event]:
        self.prefilling.remove(prompt)
        return [(sample.number, as_fault(error, sample.spec)) for sample in self._waiting.pop(prompt)]

    def _unembed(self, weights: LoraWeights | None, hidden_ND: Tensor) -> Tensor:
        return self._decoder.logits(hidden_ND, [weights] * hidden_ND.shape[0])

    # Rows

    def start_rows(self, counts: Mapping[ActiveSample, int]) -> list[Event]:
        """Start so many sequences of each of these requests, whose prompts are complete."""
        events: list[Event] = []
        behind = sum(counts.values())
        for sample, count in counts.items():
            behind -= count
            if count == sample.unstarted:
                self.starting.remove(sample)
            try:
                # The cache grows once for all sequences that start now: those of the next samples are counted too.
                events += self._start_rows_of(sample, count, behind)
            except Exception as error:  # fails this request only
                self.drop([sample])
                events.append((sample.number, as_fault(error, sample.spec)))
        return events

    def _start_rows_of(self, sample: ActiveSample, count: int, reserved_rows: int) -> list[Event]:
        """Start `count` sequences of a request: draw their first tokens, and add those that go on to the cache."""
        rows = [Row(sample, sample.started + offset, self.model) for offset in range(count)]
        sample.started += count
        events: list[Event] = []
        prompt = sample.prompt
        if prompt is None or sample.max_tokens == 0:
            for row in rows:
                row.finish("length")
            self._settle(rows)
        elif rows:
            assert prompt.logits_1V is not None
            drawn = self._draw_tokens(prompt.logits_1V.expand(count, -1), rows)
            if None in drawn:
                raise divergence_fault()
            events, ended = _add_tokens(rows, drawn)
            self._settle(ended)
            self._add_rows([row for row in rows if row not in ended], sample, prompt, reserved_rows)
        if not sample.unstarted:
            sample.prompt = None
        return events + _results([sample])

    def _add_rows(self, rows: list[Row], sample: ActiveSample, prompt: CachedPrompt, reserved_rows: int) -> None:
        """Add rows to the batch and to its cache, with a copy of the prompt unless they read it in place."""
        if not rows:
            return
        # Reading the prompt in place is worth it if several rows do, and if it is long.
        has_several_rows = prompt.is_shared or sample.spec.num_samples > 1
        is_long = prompt.prefilled >= MIN_SHARED_TOKENS
        shares_prompt = has_several_rows and is_long and self._decoder.can_share_prefix
        add = partial(self._cache.add_rows, prompt.cache, len(rows), copies_prompt=not shares_prompt)
        try:
            add(reserved_rows=reserved_rows)
        except Exception:  # memory may suffice for these rows, if not for those that come next
            if not reserved_rows:
                raise
            add()
        for row in rows:
            row.prefix = prompt if shares_prompt else None
        self.rows += rows

    def _decode(self) -> list[Event]:
        width = self._cache.width
        try:
            hidden_BD = self._decoder.step(self._cache, [row.next_input() for row in self.rows])
            logits_BV = self._decoder.logits(hidden_BD, [row.sample.weights for row in self.rows])
            drawn = self._draw_tokens(logits_BV, self.rows)
        except Exception as error:  # the batch may be too large for the memory: it continues without one request
            costs: dict[str, float] = {}
            for row in self.rows:
                costs[row.sample.tenant] = costs.get(row.sample.tenant, 0.0) + row.sample.weight
            # The last one of the tenant that has the most: a newcomer with one row is not the cause.
            last = max((row.sample for row in self.rows), key=lambda sample: (costs[sample.tenant], sample.number))
            self._cache.truncate(width)
            self.drop([last])
            return [(last.number, as_fault(error, last.spec))]
        for row in self.rows:
            row.computed_tokens += 1
        diverged = {row.sample: None for row, token in zip(self.rows, drawn, strict=True) if token is None}
        events, ended = _add_tokens(self.rows, drawn)
        self._remove_rows(ended)
        self.drop(diverged)
        events += [(sample.number, divergence_fault()) for sample in diverged]
        return events + _results(row.sample for row in ended if row.sample not in diverged)

    def _draw_tokens(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[DrawnToken | None]:
        """Draw a token for every row; None where the model gives no finite probabilities. Does not change the rows."""
        logprobs_BV = logits_BV.log_softmax(1)
        is_finite_B = logprobs_BV.amax(1).isfinite()
        if not bool(is_finite_B.all()):
            logits_BV = torch.where(is_finite_B[:, None], logits_BV, 0.0)
        tokens = sample_next_tokens(logits_BV, [row.token_sampler for row in rows])
        logprobs = logprobs_BV.gather(1, torch.tensor(tokens, device=logits_BV.device)[:, None])[:, 0].tolist()
        topk: dict[int, tuple[bytes, bytes]] = {}
        with_topk = [index for index, row in enumerate(rows) if row.wants_topk]
        if with_topk:
            most = max(rows[index].spec.topk_sample for index in with_topk)
            values_NK, tokens_NK = rank_tokens(logprobs_BV[with_topk], most)
            arrays = (tokens_NK.int().cpu().numpy(), values_NK.float().cpu().numpy())
            for index, tokens_K, values_K in zip(with_topk, *arrays, strict=True):
                count = rows[index].spec.topk_sample
                topk[index] = (tokens_K[:count].tobytes(), values_K[:count].tobytes())
        return [
            DrawnToken(token, logprob, topk.get(index)) if is_finite else None
            for index, (token, logprob, is_finite) in enumerate(
                zip(tokens, logprobs, is_finite_B.tolist(), strict=True)
            )
        ]

    def _remove_rows(self, removed: Sequence[Row]) -> None:
        """Remove rows from the batch and from its cache, keeping both in the same order."""
        if not removed:
            return
        self._settle(removed)
        indices = [index for index, row in enumerate(self.rows) if row in removed]
        order = self._cache.remove_rows(indices, [row.cached_tokens for row in self.rows])
        self.rows = [self.rows[index] for index in order]
        if not self.rows:
            self._cache = KVCache()

    def _settle(self, ended: Iterable[Row]) -> None:
        for row in ended:
            tokens, sample = len(row.tokens), row.sample
            self._accounts.settle(sample.tenant, tokens, tokens * sample.weight - sample.charged)


def _add_tokens(rows: Sequence[Row], drawn: Sequence[DrawnToken | None]) -> tuple[list[Event], list[Row]]:
    """Append the drawn tokens to their rows. Returns the tokens to stream, and the rows that have ended."""
    events: list[Event] = []
    ended = []
    for row, token in zip(rows, drawn, strict=True):
        if token is None:
            continue
        if row.spec.is_streamed:
            events.append((row.sample.number, Tokens(row.index, [token.token], [token.logprob])))
        reason = row.add_token(token)
        if reason is not None:
            row.finish(reason)
            ended.append(row)
    return events, ended


def _results(samples: Iterable[ActiveSample]) -> list[Event]:
    """Return the results of those requests whose sequences have all ended."""
    done = {sample: None for sample in samples if len(sample.finished) == sample.spec.num_samples}
    return [(sample.number, sample.result()) for sample in done]
