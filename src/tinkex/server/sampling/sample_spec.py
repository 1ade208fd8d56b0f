"""Turns a sampling request into the engine's spec, and the engine's result into the response. Pure; checks values."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from tinkex.engine.contract import ModelInfo, Sampled, SampleSpec
from tinkex.errors import ContextOverflow
from tinkex.rules import ranges
from tinkex.server.http.errors import bad_request
from tinkex.server.limits.ledger import Ledger
from tinkex.server.sampling.sample_queue import SampleTarget, TargetsLayout
from tinkex.server.training.checks import check_text
from tinkex.types.packed import pack_ints, unpack
from tinkex.types.sampling import (
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    pack_prompt_logprobs,
)
from tinkex.types.tensor import TensorData

BLOCK_BYTES = 1 << 15
"""Packed numbers that become Python's at a time: 8,192 of them, in a millisecond or two."""


def spec_of(request: SampleRequest, target: SampleTarget, *, is_streamed: bool = False) -> SampleSpec:
    """Return the engine's spec of a request. Rejects values that the engine cannot sample with."""
    params, info = request.sampling_params, target.info
    check_text(request.prompt, info, "prompt")
    if request.record_stability_info:
        raise bad_request("record_stability_info is not offered here: it belongs to stable_reinforce.", "not_offered")
    length, last_n = request.prompt.length, request.prompt_logprobs_last_n
    ranges.check_sample(
        length,
        request.num_samples,
        params,
        has_prompt_logprobs=bool(request.prompt_logprobs),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=request.target_prompt_logprobs,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        prompt_logprobs_last_n=last_n,
        max_samples=ranges.MAX_SAMPLES,
        max_topk=ranges.MAX_TOPK,
    )
    stop_tokens, stop_strings = stops_of(params.stop, info)
    return SampleSpec(
        base=info.name,
        weights=target.weights,
        prompt=tuple(request.prompt.to_ints()),
        num_samples=request.num_samples,
        max_tokens=_max_tokens(params, length, info),
        **_filters(params),
        seed=secrets.randbits(31) if params.seed is None else params.seed % (1 << 63),
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        prompt_logprobs=bool(request.prompt_logprobs),
        topk_prompt=request.topk_prompt_logprobs,
        topk_sample=request.topk_sample_logprobs,
        alt_k=request.prompt_alt_tokens_k,
        last_n=None if last_n is None else min(last_n, length),
        targets=_targets(request.target_prompt_logprobs, info),
        is_streamed=is_streamed,
    )


def stops_of(
    stop: str | Sequence[str] | Sequence[int] | None, info: ModelInfo
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return stop tokens and stop strings. None is the model's end tokens; a list replaces them, also an empty one."""
    if stop is None:
        return info.end_tokens, ()
    entries = [stop] if isinstance(stop, str) else stop
    tokens = tuple(entry for entry in entries if isinstance(entry, int))
    if any(token >= info.vocab_size for token in tokens):
        raise bad_request(
            f"stop holds a token that {info.name} does not know (0 to {info.vocab_size - 1}).", "bad_stop"
        )
    return tokens, tuple(entry for entry in entries if isinstance(entry, str))


def _max_tokens(params: SamplingParams, length: int, info: ModelInfo) -> int:
    """Return how many tokens to draw at most. A prompt that fills the context can still be scored."""
    room = max(info.max_context_length - length, 1)
    wanted = params.max_tokens if params.max_tokens is not None else room
    if wanted > room or length > info.max_context_length:
        raise ContextOverflow(length, wanted, info.max_context_length)
    return wanted


def _filters(params: SamplingParams) -> dict[str, Any]:
    """The parameters that choose among tokens, with the defaults of those that are None."""
    return {
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        # More than any vocabulary is no limit, however much more.
        "top_k": min(params.top_k, 2**31 - 1),
        "min_p": params.min_p or 0.0,
        "presence_penalty": params.presence_penalty or 0.0,
        "frequency_penalty": params.frequency_penalty or 0.0,
        "repetition_penalty": 1.0 if params.repetition_penalty is None else params.repetition_penalty,
    }


def _targets(tensor: TensorData | None, info: ModelInfo) -> tuple[tuple[int, ...], ...] | None:
    if tensor is None:
        return None
    shape = tensor.shape or []
    values = tensor.data
    bounds = tensor.sparse_crow_indices or list(range(0, len(values) + 1, max(shape[1], 1)))
    for position, token in enumerate(values):
        if not 0 <= token < info.vocab_size:
            raise ranges.unknown_token_error("target_prompt_logprobs", position, int(token), info.name, info.vocab_size)
    if shape[1] == 0:
        return tuple(() for _ in range(shape[0]))
    return tuple(tuple(map(int, values[bounds[row] : bounds[row + 1]])) for row in range(shape[0]))


# ── Limits


def values_of(spec: SampleSpec) -> int:
    """Return how many numbers a sample may return."""
    sampled = spec.num_samples * spec.max_tokens * (1 + spec.topk_sample)
    # Alternatives are written as two tensors, which JSON cannot be made of in pieces.
    about_prompt = len(spec.prompt) * (spec.prompt_logprobs + spec.topk_prompt + 8 * spec.alt_k)
    return sampled + about_prompt + sum(map(len, spec.targets or ()))


def check_limits(specs: Sequence[SampleSpec], ledger: Ledger, value_cost: int = 1) -> None:
    """Reject samples of one request that together return too much, or that have too many or too long stop strings.

    `value_cost` is what a number of the response costs, compared with one that stays packed.
    """
    values = value_cost * sum(map(values_of, specs))
    ledger.check("max_sample_values", values, f"This request may return {values} numbers")
    for spec in specs:
        stops = len(spec.stop_tokens) + len(spec.stop_strings)
        ledger.check("max_stops", stops, f"This request has {stops} stop strings and stop tokens")
        characters = sum(map(len, spec.stop_strings))
        ledger.check("max_text_characters", characters, f"The stop strings have {characters} characters together")


# ── Results


def response_of(result: Sampled, layout: TargetsLayout | None, sequence_ids: Sequence[str]) -> SampleResponse:
    """Return the response to a sample. Looks at the result's packed numbers and copies none."""
    sequences = [
        SampledSequence.from_buffers(row.stop_reason, row.packed_tokens, row.packed_logprobs, name, row.topk)
        for row, name in zip(result.sequences, sequence_ids, strict=True)
    ]
    return SampleResponse.from_buffers(
        sequences,
        None if result.prompt_logprobs is None else pack_prompt_logprobs(result.prompt_logprobs),
        result.topk_prompt,
        _target_tensor(result, layout),
        result.cache_hit_tokens,
        _alternatives(result),
    )


def _target_tensor(result: Sampled, layout: TargetsLayout | None) -> TensorData | None:
    if result.targets is None or layout is None:
        return None
    return TensorData.from_buffer(result.targets, "float32", layout.shape, layout.crow, layout.col)


def _alternatives(result: Sampled) -> PromptAltTokens | None:
    if (drawn := result.alternatives) is None:
        return None
    tokens, logprobs = drawn.packed()
    shape = [drawn.length, drawn.k]
    wide = b"".join(pack_ints(unpack("i", tokens[at : at + BLOCK_BYTES])) for at in range(0, len(tokens), BLOCK_BYTES))
    return PromptAltTokens(
        TensorData.from_buffer(wide, "int64", shape), TensorData.from_buffer(logprobs, "float32", shape)
    )
