"""A sampling request in vLLM's words, and vLLM's output in ours. Pure: loads neither vLLM nor torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tinkex.engine.contract import EngineFault, ModelInfo, Sampled, SampleSpec, SequenceOutput, Tokens
from tinkex.types.sampling import TopkLogprobs

COLDEST = 1e-6
"""Lower temperatures count as 0, as with our own sampler."""
COOL = 0.01
"""vLLM raises temperatures between 0 and this one."""
MOST_LOGPROBS = 1024
"""As many ranked tokens at a position as our own sampler returns."""


class RankedToken(Protocol):
    """What vLLM says about a token at one position."""

    @property
    def logprob(self) -> float: ...

    @property
    def rank(self) -> int | None: ...


Position = Mapping[int, RankedToken]
"""The ranked tokens of one position, and the one that is there."""


class Output(Protocol):
    """Some new tokens of one sequence (`vllm.CompletionOutput` of a request with `DELTA`)."""

    @property
    def index(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[Position] | None: ...

    @property
    def finish_reason(self) -> str | None: ...


def lack_reason(spec: SampleSpec, model: ModelInfo) -> str | None:
    """Return what a request asks that vLLM does not offer, or None."""
    if spec.alt_k:
        return "prompt_alt_tokens_k"
    if spec.targets is not None:  # since 0.32 with its second runner, which needs a GPU
        return "target_prompt_logprobs"
    if spec.prompt_logprobs or spec.topk_prompt:
        # With adapters on the unembedding vLLM takes the rows of a prompt for the requests of the batch. In 0.32 on a
        # CPU such a request beside four samples ended its engine; with as many rows as requests it would be wrong.
        return "log-probabilities of the prompt"
    if spec.num_samples < 1 or spec.max_tokens < 1:
        return "a request that draws no token"
    if model.max_context_length and len(spec.prompt) >= model.max_context_length:
        return "a prompt that fills the context"
    if COLDEST <= spec.temperature < COOL:
        return f"a temperature between 0 and {COOL}"
    return None


def sampling_arguments(spec: SampleSpec, vocabulary: int) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams`. Reported log-probabilities are the model's own, as with ours."""
    return {
        "n": spec.num_samples,
        "max_tokens": spec.max_tokens,
        "temperature": 0.0 if spec.temperature < COLDEST else spec.temperature,
        "top_k": spec.top_k if spec.top_k > 0 else -1,
        "top_p": spec.top_p,
        "min_p": spec.min_p,
        "repetition_penalty": spec.repetition_penalty,
        "presence_penalty": spec.presence_penalty,
        "frequency_penalty": spec.frequency_penalty,
        "seed": spread_seed(spec.seed),
        "ignore_eos": True,  # the server names the end tokens among the stop tokens, unless the client has its own
        "stop_token_ids": list(spec.stop_tokens) or None,
        "stop": [string for string in spec.stop_strings if string] or None,
        "include_stop_str_in_output": True,
        "detokenize": any(spec.stop_strings),
        "skip_special_tokens": False,
        "logprobs": min(spec.topk_sample, vocabulary),
    }


def spread_seed(seed: int) -> int:
    """Return the seed for vLLM, which draws the samples of a request with the seed, the next number, and so on.

    Spread, so that requests with the seeds 7 and 8 have no sample in common.
    """
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest()) >> 2


def check_prompt(spec: SampleSpec, vocabulary: int) -> None:
    """Reject tokens that the model does not have: an index out of range may end the process."""
    wrong = next((token for token in spec.prompt if not 0 <= token < vocabulary), None)
    if wrong is not None or not spec.prompt:
        what = "is empty" if wrong is None else f"has the token {wrong}, and {spec.base} knows 0 to {vocabulary - 1}"
        raise EngineFault(f"The prompt {what}.")


class Collector:
    """Collects the outputs of one request until they are a result."""

    def __init__(self, spec: SampleSpec) -> None:
        self._spec = spec
        self._rows = [_Row() for _ in range(spec.num_samples)]
        self._cached = 0

    @property
    def length(self) -> int:
        return sum(len(row.tokens) for row in self._rows)

    def add(self, outputs: Iterable[Output], cached: int | None) -> list[Tokens]:
        """Add what vLLM has sent. Returns what a stream sends."""
        self._cached = cached or self._cached
        events = []
        for output in outputs:
            row, tokens = self._rows[output.index], list(output.token_ids)
            positions = (output.logprobs or ())[: len(tokens)]
            logprobs = [float(place[token].logprob) for token, place in zip(tokens, positions, strict=True)]
            if not all(map(math.isfinite, logprobs)):
                raise EngineFault(
                    "The model gives no finite probabilities with these weights: training has diverged. Sample from an "
                    "earlier checkpoint, and train with a lower learning rate or with grad_clip_norm."
                )
            row.tokens += tokens
            row.logprobs += logprobs
            if self._spec.topk_sample:
                row.topk += [ranked(place, self._spec.topk_sample) for place in positions]
            if output.finish_reason is not None:
                row.stop_reason = "length" if output.finish_reason == "length" else "stop"
            if tokens:
                events.append(Tokens(output.index, tokens, logprobs))
        return events

    def result(self) -> Sampled:
        spec = self._spec
        if any(row.stop_reason is None for row in self._rows):
            raise EngineFault("vLLM ended a request without a result.", "server")
        return Sampled(
            sequences=[
                SequenceOutput(
                    tokens=row.tokens,
                    logprobs=row.logprobs,
                    stop_reason=row.stop_reason or "",
                    topk=TopkLogprobs.from_lists(row.topk) if spec.topk_sample else None,
                )
                for row in self._rows
            ],
            cache_hit_tokens=self._cached,
            prompt_tokens=len(spec.prompt),
        )


class _Row:
    """One sequence so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.topk: list[list[tuple[int, float]] | None] = []
        self.stop_reason: str | None = None


def ranked(place: Position, count: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a position, the likeliest first. The one that is there may not be among them."""
    best = sorted((entry.rank or 0, token, float(entry.logprob)) for token, entry in place.items())
    return [(token, logprob) for _, token, logprob in best[:count]]
