"""One decode batch: sampling requests of one base model, with any adapters, which join and leave between steps.

A prompt is read once, in chunks, into a cache of its own, for all requests that have it; each sequence then joins the
batch as a row, with a copy of it or looking at the one that is there. Whether there is room for a row is the caller's
to say (`Sampler`).

Axes: B rows of the batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.lora import LoraWeights
from tinkex.engine.contract import EngineFault, Sampled, SampleEvent, SampleSpec, Tokens
from tinkex.engine.contract import Sequence as SampledSequence
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.decoder import Decoder, Next, Reading
from tinkex.engine.sampling.kv_cache import RowCache
from tinkex.engine.sampling.next_token import Chooser, choose, ranked
from tinkex.engine.sampling.prefix_cache import Prompt, PromptCache
from tinkex.engine.sampling.prompt_logprobs import PromptScores, not_finite, pairs_of
from tinkex.engine.sampling.stop_strings import StopStrings

logger = logging.getLogger("tinkex.engine")

CHUNK = 512
"""Prompt tokens of one step. Larger multiplies run little faster, and everybody else waits for them."""
BESIDE = 4
"""While rows are waiting for their next token, a chunk is so many times smaller."""
SHARED_FROM = 64
"""Tokens from which rows look at a shared prompt instead of copying it: below, a second look costs more."""

Event = tuple[int, SampleEvent | EngineFault]


@dataclass(slots=True, eq=False)
class Request:
    """A sampling request on its way."""

    number: int
    spec: SampleSpec
    most: int
    """Tokens that a sequence may have at most: as asked, or as the context leaves."""
    stops: Callable[[], StopStrings] | None
    """Makes the watcher of one sequence, if there are stop strings."""
    scores: PromptScores
    key: Hashable = None
    """Which weights those are, by their files."""
    weights: LoraWeights | None = None
    prompt: Prompt | None = None
    """Gone when the last sequence has started."""
    hit_tokens: int = 0
    """Tokens of the prompt that had been read for another request."""
    started: int = 0
    finished: dict[int, SampledSequence] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of one row at most."""
        return len(self.spec.prompt) + self.most

    @property
    def waiting(self) -> int:
        """Sequences that have not started."""
        return self.spec.num_samples - self.started

    @property
    def places(self) -> int:
        """Rows' worth of room that it needs besides its rows: for the prompt, and for a first row if both must be."""
        return 2 if self.spec.num_samples > 1 and not self.started else 1

    def result(self) -> Sampled:
        return Sampled(
            sequences=[self.finished[index] for index in range(self.spec.num_samples)],
            prompt_logprobs=self.scores.logprobs,
            topk_prompt=self.scores.topk,
            targets=self.scores.targets,
            alternatives=self.scores.alternatives,
            cache_hit_tokens=self.hit_tokens,
            prompt_tokens=len(self.spec.prompt),
        )


class Drawn(NamedTuple):
    """One token, with the most likely ones if they are wanted."""

    token: int
    logprob: float
    topk: list[tuple[int, float]] | None


class Row:
    """One sequence of a request."""

    def __init__(self, request: Request, index: int, model: Model) -> None:
        self.request = request
        self.spec = request.spec
        self.index = index
        self.chooser = Chooser(request.spec, index, model.vocab_size, model.device)
        self.length = len(request.spec.prompt)
        """Tokens whose keys are known; the last one drawn is not among them."""
        self.prefix: Prompt | None = None
        """The prompt, if it looks at the shared one instead of having copied it."""
        self._stops = request.stops() if request.stops else None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.topk: list[list[tuple[int, float]]] | None = [] if request.spec.topk_sample > 0 else None

    @property
    def held(self) -> int:
        """Tokens in the batch's own cache."""
        return self.length - (0 if self.prefix is None else self.prefix.at)

    def next(self) -> Next:
        prefix = None if self.prefix is None else self.prefix.cache
        return Next(self.tokens[-1], self.length, self.held, self.request.weights, prefix)

    def take(self, drawn: Drawn) -> str | None:
        """Add a token that was drawn. Returns why the sequence ends with it, or None."""
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if self.topk is not None and drawn.topk is not None:
            self.topk.append(drawn.topk)
        self.chooser.note(drawn.token)
        has_stop_string = self._stops is not None and self._stops.push(drawn.token)
        if drawn.token in self.spec.stop_tokens or has_stop_string:
            return "stop"
        return "length" if len(self.tokens) >= self.request.most else None

    def finish(self, reason: str) -> None:
        self.request.finished[self.index] = SampledSequence(
            tokens=self.tokens, logprobs=self.logprobs, stop_reason=reason, topk=self.topk
        )


class DecodeBatch:
    """Requests of one base model, with any adapters."""

    def __init__(self, model: Model, decoder: Decoder, prompts: PromptCache) -> None:
        self.model = model
        self._decoder = decoder
        self._prompts = prompts
        self._cache = RowCache()
        self._was_prefill = False
        self.prefilling: deque[Prompt] = deque()
        self._waiting: dict[Prompt, list[Request]] = {}
        """Those that wait for a prompt to be read."""
        self.starting: deque[Request] = deque()
        """Prefilled, with sequences that have not started."""
        self.rows: list[Row] = []

    @property
    def has_work(self) -> bool:
        return bool(self.prefilling or self.starting or self.rows)

    @property
    def _reading(self) -> list[Request]:
        return [request for requests in self._waiting.values() for request in requests]

    @property
    def requests(self) -> list[Request]:
        """All that are in it, each once."""
        return list(dict.fromkeys([*self._reading, *self.starting, *(row.request for row in self.rows)]))

    @property
    def load(self) -> tuple[int, int]:
        """Rows, prompts counted as such, and the length that the longest of them may reach."""
        prompts = [*self._reading, *self.starting]
        lengths = [request.length for request in (*prompts, *(row.request for row in self.rows))]
        return len(self.rows) + sum(request.places for request in prompts), max(lengths, default=0)

    @property
    def cache_bytes(self) -> int:
        prompts = {*self.prefilling, *(request.prompt for request in self.starting), *(row.prefix for row in self.rows)}
        return self._cache.nbytes + sum(prompt.cache.nbytes for prompt in prompts if prompt is not None)

    def add(self, request: Request) -> None:
        """Let a request in. A prompt that is known is not read again; nor is what it has in common with a known one."""
        wanted = Prompt(request.key, request.spec.prompt, request.weights)
        if request.scores.is_wanted:  # every hidden state is needed
            request.prompt = wanted
        else:
            reading = next((prompt for prompt in self.prefilling if prompt.same_as(wanted)), None)
            request.prompt = reading or self._prompts.find(wanted)
            request.hit_tokens = len(wanted.tokens) if reading is not None else request.prompt.at
            if reading is not None:
                reading.is_shared = True
        if request.prompt.is_read:
            request.prompt.is_shared = True
            self.starting.append(request)
            return
        if request.prompt not in self._waiting:
            self.prefilling.append(request.prompt)
        self._waiting.setdefault(request.prompt, []).append(request)

    def step(self, room: Callable[[Request], int]) -> list[Event]:
        """Prefill one chunk, or decode one token of every row, in turns."""
        if self.prefilling and not (self.rows and self._was_prefill):
            self._was_prefill = True
            return self._prefill() + self.start(room)
        self._was_prefill = False
        return self._decode() if self.rows else []

    def drop(self, requests: Iterable[Request]) -> None:
        """Take requests out, wherever they are."""
        gone = set(requests)
        for prompt, waiting in list(self._waiting.items()):
            self._waiting[prompt] = [request for request in waiting if request not in gone]
            if not self._waiting[prompt]:
                del self._waiting[prompt]
        self.prefilling = deque(prompt for prompt in self.prefilling if prompt in self._waiting)
        self.starting = deque(request for request in self.starting if request not in gone)
        self._leave([row for row in self.rows if row.request in gone])

    # Prompts

    def _prefill(self) -> list[Event]:
        """A chunk's worth of prompt tokens: part of a long prompt, or several short ones."""
        readings: list[tuple[Prompt, Reading]] = []
        budget = max(1, CHUNK // BESIDE) if self.rows else CHUNK
        for prompt in self.prefilling:
            if budget <= 0:
                break
            tokens = prompt.tokens[prompt.at : prompt.at + budget]
            readings.append((prompt, Reading(prompt.cache, prompt.at, tokens, prompt.weights)))
            budget -= len(tokens)
        try:
            found = self._decoder.read([reading for _, reading in readings])
        except Exception as error:
            if len(readings) == 1:
                return self._unread(readings[0][0], error)
            found = []
        events: list[Event] = []
        last: dict[Prompt, Tensor] = {}
        for number, (prompt, reading) in enumerate(readings):
            try:
                if found:
                    hidden_TD = found[number]
                else:  # together it failed: one by one, so that only the guilty fails
                    prompt.cache.roll_back(prompt.at)
                    (hidden_TD,) = self._decoder.read([reading])
                for request in self._waiting[prompt]:
                    unembed = partial(self._unembed, request.weights)
                    request.scores.read(hidden_TD, prompt.at, unembed, self.model.vocab_size)
            except Exception as error:  # this request's trouble must not become the others'
                events += self._unread(prompt, error)
                continue
            prompt.at += hidden_TD.shape[0]
            if prompt.at == len(prompt.tokens):
                last[prompt] = hidden_TD[-1:]
            else:  # a long one goes behind the others
                self.prefilling.remove(prompt)
                self.prefilling.append(prompt)
        self._finish_reading(last)
        return events

    def _finish_reading(self, last: Mapping[Prompt, Tensor]) -> None:
        """Prompts that are read, and their last hidden states: first tokens are drawn from those, for all at once."""
        drawing = [prompt for prompt in last if any(request.most > 0 for request in self._waiting[prompt])]
        if drawing:
            hidden_ND = torch.cat([last[prompt] for prompt in drawing])
            logits_NV = self._decoder.logits(hidden_ND, [prompt.weights for prompt in drawing])
            for prompt, logits_1V in zip(drawing, torch.split(logits_NV, 1), strict=True):
                prompt.logits_1V = logits_1V.clone()  # a row, not all of them, for as long as the prompt is kept
                self._prompts.keep(prompt)
        for prompt in last:
            prompt.weights = None  # a prompt that is kept must not keep an adapter
            self.prefilling.remove(prompt)
            self.starting += self._waiting.pop(prompt)

    def _unread(self, prompt: Prompt, error: Exception) -> list[Event]:
        self.prefilling.remove(prompt)
        return [(request.number, as_fault(error, request)) for request in self._waiting.pop(prompt)]

    def _unembed(self, weights: LoraWeights | None, hidden_ND: Tensor) -> Tensor:
        return self._decoder.logits(hidden_ND, [weights] * hidden_ND.shape[0])

    # Rows

    def start(self, room: Callable[[Request], int]) -> list[Event]:
        """Start as many sequences of prefilled prompts as there is room for, first come first served."""
        events: list[Event] = []
        while self.starting:
            request = self.starting[0]
            # With its last sequence a request gives up its prompt's place; and a batch never stands still.
            free = room(request) + request.places
            count = request.waiting if request.waiting <= free else max(free - 1, 0 if self.rows else 1)
            if count == 0 and request.waiting:
                break
            if count == request.waiting:
                self.starting.popleft()
            try:
                # Those behind it that fit beside it are next: room is made once for all.
                behind = sum(other.waiting for other in self.starting if other is not request)
                events += self._start(request, count, max(min(behind, free - count), 0))
            except Exception as error:  # as above
                self.drop([request])
                events.append((request.number, as_fault(error, request)))
        return events

    def _start(self, request: Request, count: int, coming: int) -> list[Event]:
        rows = [Row(request, request.started + place, self.model) for place in range(count)]
        request.started += count
        events: list[Event] = []
        prompt = request.prompt
        if prompt is None or request.most == 0:
            for row in rows:
                row.finish("length")
        elif rows:
            assert prompt.logits_1V is not None
            drawn = self._draw(prompt.logits_1V.expand(count, -1), rows)
            if None in drawn:
                raise not_finite()
            events, over = _take(rows, drawn)
            alive = [row for row in rows if row not in over]
            if alive:
                is_shared = self._is_shared(request, prompt)
                try:
                    self._cache.join(prompt.cache, len(alive), is_copied=not is_shared, coming=coming)
                except Exception:  # there may be room for these, if not for those that come next
                    if not coming:
                        raise
                    self._cache.join(prompt.cache, len(alive), is_copied=not is_shared)
                for row in alive:
                    row.prefix = prompt if is_shared else None
                self.rows += alive
        if not request.waiting:
            request.prompt = None
        return events + _results([request])

    def _is_shared(self, request: Request, prompt: Prompt) -> bool:
        """Whether its rows look at the prompt where it is: worth it if others do too, and if it is long."""
        is_wanted = prompt.is_shared or request.spec.num_samples > 1
        return is_wanted and self._decoder.can_share and prompt.at >= SHARED_FROM

    def _decode(self) -> list[Event]:
        """The next token of every row."""
        width = self._cache.width
        try:
            hidden_BD = self._decoder.step(self._cache, [row.next() for row in self.rows])
            drawn = self._draw(self._decoder.logits(hidden_BD, [row.request.weights for row in self.rows]), self.rows)
        except Exception as error:  # the batch may have become too large: without its last request it goes on
            last = max((row.request for row in self.rows), key=lambda request: request.number)
            self._cache.roll_back(width)
            self.drop([last])
            return [(last.number, as_fault(error, last))]
        for row in self.rows:
            row.length += 1
        broken = {row.request: None for row, token in zip(self.rows, drawn, strict=True) if token is None}
        events, over = _take(self.rows, drawn)
        self._leave(over)
        self.drop(broken)
        events += [(request.number, not_finite()) for request in broken]
        return events + _results(row.request for row in over if row.request not in broken)

    def _draw(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[Drawn | None]:
        """A token for every row, or None where the model gives no finite probabilities. The rows stay as they are."""
        logprobs_BV = logits_BV.log_softmax(1)
        is_finite_B = logprobs_BV.amax(1).isfinite()
        if not bool(is_finite_B.all()):
            logits_BV = torch.where(is_finite_B[:, None], logits_BV, 0.0)
        tokens = choose(logits_BV, [row.chooser for row in rows])
        logprobs = logprobs_BV.gather(1, torch.tensor(tokens, device=logits_BV.device)[:, None])[:, 0].tolist()
        topk: dict[int, list[tuple[int, float]]] = {}
        asking = [place for place, row in enumerate(rows) if row.topk is not None]
        if asking:
            values_NK, tokens_NK = ranked(logprobs_BV[asking], max(rows[place].spec.topk_sample for place in asking))
            found = pairs_of(tokens_NK, values_NK)
            topk = {place: pairs[: rows[place].spec.topk_sample] for place, pairs in zip(asking, found, strict=True)}
        return [
            Drawn(token, logprob, topk.get(place)) if is_finite else None
            for place, (token, logprob, is_finite) in enumerate(
                zip(tokens, logprobs, is_finite_B.tolist(), strict=True)
            )
        ]

    def _leave(self, gone: Sequence[Row]) -> None:
        if not gone:
            return
        places = [place for place, row in enumerate(self.rows) if row in gone]
        order = self._cache.leave(places, [row.held for row in self.rows])
        self.rows = [self.rows[place] for place in order]
        if not self.rows:
            self._cache = RowCache()


def _take(rows: Sequence[Row], drawn: Sequence[Drawn | None]) -> tuple[list[Event], list[Row]]:
    """Give the rows their tokens: what is to be streamed, and the rows that are over."""
    events: list[Event] = []
    over = []
    for row, token in zip(rows, drawn, strict=True):
        if token is None:
            continue
        if row.spec.is_streamed:
            events.append((row.request.number, Tokens(row.index, [token.token], [token.logprob])))
        reason = row.take(token)
        if reason is not None:
            row.finish(reason)
            over.append(row)
    return events, over


def _results(requests: Iterable[Request]) -> list[Event]:
    """The answers of those requests that have all their sequences."""
    done = {request: None for request in requests if len(request.finished) == request.spec.num_samples}
    return [(request.number, request.result()) for request in done]


def as_fault(error: Exception, request: Request) -> EngineFault:
    """What the caller is told. The log has the rest."""
    if isinstance(error, EngineFault):
        return error
    logger.error("sampling failed", exc_info=error)
    what = (
        f"a prompt of {len(request.spec.prompt)} tokens, {request.spec.num_samples} x {request.most} tokens asked for"
    )
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
        return EngineFault(
            f"The engine had not enough memory for this request ({what}). "
            "Ask for fewer or shorter samples, or again when less is going on.",
            "server",
        )
    return EngineFault(
        f"The engine failed at this request ({what}): {type(error).__name__}. The log of the service has the details.",
        "server",
    )
