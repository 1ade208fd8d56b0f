"""Turns a sampling request into the engine's spec, and the engine's result into the response. Pure; checks values."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from math import isfinite
from typing import Any

from tinkex.engine.contract import ModelInfo, Sampled, SampleSpec
from tinkex.server.http.errors import bad
from tinkex.server.sampling.sample_queue import Target
from tinkex.server.training.checks import check_prompt
from tinkex.types.packed import pack_floats, pack_tokens
from tinkex.types.sampling import (
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    pack_prompt_logprobs,
)
from tinkex.types.tensor import TensorData
from tinkex.types.topk import TopkList, TopkLogprobs

MAX_SAMPLES = 1024
MAX_TOPK = 1024


def spec_of(request: SampleRequest, target: Target, *, is_streamed: bool = False) -> SampleSpec:
    """Return the engine's spec of a request. Rejects values that the engine cannot sample with."""
    params, info = request.sampling_params, target.info
    length = check_prompt(request.prompt, info, "prompt")
    if request.record_stability_info:
        raise bad("record_stability_info is not offered here: it belongs to stable_reinforce.", "not_offered")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise bad(f"num_samples must be from 1 to {MAX_SAMPLES}, not {request.num_samples}.", "bad_num_samples")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and last_n < 1:
        raise bad(f"prompt_logprobs_last_n must be at least 1, not {last_n}.", "bad_last_n")
    if last_n is not None and not request.prompt_logprobs:
        raise bad("prompt_logprobs_last_n selects among prompt logprobs: also set prompt_logprobs.", "bad_last_n")
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
        topk_prompt=_count("topk_prompt_logprobs", request.topk_prompt_logprobs),
        topk_sample=_count("topk_sample_logprobs", request.topk_sample_logprobs),
        alt_k=_count("prompt_alt_tokens_k", request.prompt_alt_tokens_k),
        last_n=None if last_n is None else min(last_n, length),
        targets=_targets(request.target_prompt_logprobs, length, info),
        is_streamed=is_streamed,
    )


def stops_of(stop: object, info: ModelInfo) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return stop tokens and stop strings. None is the model's end tokens; a list replaces them, also an empty one."""
    if stop is None:
        return info.end_tokens, ()
    entries = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Sequence) else [stop]
    if any(isinstance(entry, bool) or not isinstance(entry, (str, int)) for entry in entries):
        raise bad("stop must be a string, strings, or token ids.", "bad_stop")
    if "" in entries:
        raise bad("stop must not hold an empty string: it would end every sequence at once.", "bad_stop")
    tokens = tuple(entry for entry in entries if isinstance(entry, int))
    if any(not 0 <= token < info.vocab_size for token in tokens):
        raise bad(f"stop holds a token that {info.name} does not know (0 to {info.vocab_size - 1}).", "bad_stop")
    return tokens, tuple(entry for entry in entries if isinstance(entry, str))


def _max_tokens(params: SamplingParams, length: int, info: ModelInfo) -> int:
    room = info.max_context_length - length
    asked = params.max_tokens
    if asked is None:
        # A prompt that fills the context can still be scored; there is no room to draw from it.
        return max(room, 1)
    if asked < 1:
        raise bad(f"max_tokens must be at least 1, not {asked}.", "bad_max_tokens")
    if asked > max(room, 1):
        raise bad(
            f"Prompt length plus max_tokens exceeds the model's context window: {length} prompt tokens + {asked} "
            f"max_tokens > {info.max_context_length}. Shorten the prompt, or set max_tokens to at most {max(room, 0)}.",
            "context_exceeded",
        )
    return asked


def _filters(params: SamplingParams) -> dict[str, Any]:
    given = {
        "temperature": (params.temperature, 0.0, float("inf")),
        "top_p": (params.top_p, 0.0, 1.0),
        "min_p": (0.0 if params.min_p is None else params.min_p, 0.0, 1.0),
        "presence_penalty": (params.presence_penalty or 0.0, -100.0, 100.0),
        "frequency_penalty": (params.frequency_penalty or 0.0, -100.0, 100.0),
        "repetition_penalty": (1.0 if params.repetition_penalty is None else params.repetition_penalty, 1e-3, 1e3),
    }
    for name, (value, low, high) in given.items():
        if not isfinite(value) or not low <= value <= high:
            raise bad(f"{name} must be a number from {low:g} to {high:g}, not {value}.", f"bad_{name}")
    if params.top_p == 0:
        raise bad("top_p must be above 0. For the likeliest token every time, set temperature=0.", "bad_top_p")
    if params.top_k < -1 or params.top_k == 0:
        raise bad(f"top_k must be -1 (off) or at least 1, not {params.top_k}.", "bad_top_k")
    return {name: float(value) for name, (value, _, _) in given.items()} | {
        # More than any vocabulary is no limit, however much more.
        "top_k": min(params.top_k, 2**31 - 1)
    }


def _count(name: str, value: int | None) -> int:
    if value is not None and not 0 <= value <= MAX_TOPK:
        raise bad(f"{name} must be from 0 to {MAX_TOPK}, not {value}.", f"bad_{name}")
    return value or 0


def _targets(tensor: TensorData | None, length: int, info: ModelInfo) -> tuple[tuple[int, ...], ...] | None:
    if tensor is None:
        return None
    shape = tensor.shape
    if tensor.dtype != "int64" or shape is None or len(shape) != 2 or shape[0] != length - 1:
        raise bad(
            f"target_prompt_logprobs must be int64 tokens of shape [{length - 1}, K]: K for every prompt position "
            f"after the first. It is {tensor.dtype} of shape {shape}.",
            "bad_targets",
        )
    values = tensor.data
    bounds = tensor.sparse_crow_indices or list(range(0, len(values) + 1, max(shape[1], 1)))
    if values and not 0 <= min(values) <= max(values) < info.vocab_size:
        raise bad(f"target_prompt_logprobs holds a token outside 0 to {info.vocab_size - 1}.", "unknown_token")
    if shape[1] == 0:
        return tuple(() for _ in range(shape[0]))
    return tuple(tuple(map(int, values[bounds[row] : bounds[row + 1]])) for row in range(shape[0]))


def response_of(result: Sampled, layout: TensorData | None, sequence_ids: Sequence[str]) -> SampleResponse:
    """Return the response to the client."""
    sequences = [
        SampledSequence.from_buffers(
            row.stop_reason,
            pack_tokens(row.tokens),
            pack_floats(row.logprobs),
            name,
            None if row.topk is None else TopkLogprobs.from_lists(list(row.topk)),
        )
        for row, name in zip(result.sequences, sequence_ids, strict=True)
    ]
    topk: TopkList | None = result.topk_prompt
    return SampleResponse.from_buffers(
        sequences,
        None if result.prompt_logprobs is None else pack_prompt_logprobs(result.prompt_logprobs),
        None if topk is None else TopkLogprobs.from_lists(topk),
        _target_tensor(result, layout),
        result.cache_hit_tokens,
        _alternatives(result),
    )


def _target_tensor(result: Sampled, layout: TensorData | None) -> TensorData | None:
    if result.targets is None or layout is None:
        return None
    flat = pack_floats([value for row in result.targets for value in row])
    crow, col = layout.sparse_crow_indices, layout.sparse_col_indices
    return TensorData.from_buffer(flat, "float32", layout.shape, crow, col)


def _alternatives(result: Sampled) -> PromptAltTokens | None:
    rows = result.alternatives
    if rows is None:
        return None
    shape = [len(rows), len(rows[0]) if rows else 0]
    tokens = TensorData([token for row in rows for token, _ in row], "int64", shape)
    return PromptAltTokens(tokens, TensorData([value for row in rows for _, value in row], "float32", shape))
