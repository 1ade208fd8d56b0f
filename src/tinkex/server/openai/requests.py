"""Reads and checks requests in OpenAI's format. Pure: no model, no tokenizer, no HTTP in here.

An unknown field is ignored. A field that would change the response and is not supported is rejected by name.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tinkex.engine.contract import ModelInfo, SampleSpec
from tinkex.server.openai.chat import read_messages, read_tools
from tinkex.server.openai.errors import BadField

MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 2048
MAX_LOGPROBS: Final = 20
MAX_STOPS: Final = 16
DEFAULT_COMPLETION_TOKENS: Final = 16
"""The default max_tokens of a completion, as at OpenAI. A chat may fill the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """The options that completions and chats share. None leaves the choice to the service."""

    model: str
    filters: Mapping[str, Any]
    """The options that choose among tokens, by their names in `SampleSpec`."""
    n: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    """How many alternatives to report for every token. 0: only its own log-probability; None: not even that."""
    is_streamed: bool = False
    with_usage: bool = False
    """Whether the last event of a stream holds the usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request for completions. `prompts` are texts or tokens; if `is_echoed`, the response begins with the prompt."""

    options: CompletionOptions
    prompts: tuple[str | tuple[int, ...], ...]
    is_echoed: bool = False
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    options: CompletionOptions
    messages: list[dict[str, Any]]
    """As chat templates expect them: content is text, a call's arguments are an object."""
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    template_extras: Mapping[str, Any] = field(default_factory=dict)


def read_completion(body: Mapping[str, Any]) -> Completion:
    fields = _supported_fields(body, _UNSUPPORTED | _UNSUPPORTED_IN_COMPLETIONS)
    n = _whole(fields, "n", 1, 1, MAX_CHOICES)
    if _whole(fields, "best_of", n, 1, MAX_CHOICES) != n:
        raise BadField("best_of", "this service returns every sample it draws. Set n instead.", "unsupported")
    prompts = _prompts(fields.get("prompt"))
    is_echoed = _boolean(fields, "echo")
    # A completion that echoes the prompt and samples nothing is the way to score a prompt.
    options = _options(
        fields, DEFAULT_COMPLETION_TOKENS, _whole_or_none(fields, "logprobs", 0, MAX_LOGPROBS), 0 if is_echoed else 1
    )
    if len(prompts) * n > MAX_PROMPTS:
        raise BadField("prompt", f"{len(prompts)} prompts with n={n} are more than {MAX_PROMPTS} choices.")
    return Completion(
        options=options,
        prompts=prompts,
        is_echoed=is_echoed,
        add_special_tokens=_boolean(fields, "add_special_tokens", default=True),
    )


def read_chat(body: Mapping[str, Any]) -> Chat:
    fields = _supported_fields(body, _UNSUPPORTED | _UNSUPPORTED_IN_CHATS)
    top_logprobs = _whole_or_none(fields, "top_logprobs", 0, MAX_LOGPROBS)
    wants_logprobs = _boolean(fields, "logprobs")
    if top_logprobs and not wants_logprobs:
        raise BadField("top_logprobs", "needs logprobs to be true.")
    if any(kind != "text" for kind in _list(fields, "modalities")):
        raise BadField("modalities", "this service returns text only.", "unsupported")
    extras = fields.get("chat_template_kwargs", {})
    if not isinstance(extras, dict):
        raise BadField("chat_template_kwargs", "must be an object.")
    return Chat(
        options=_options(fields, None, (top_logprobs or 0) if wants_logprobs else None, 1),
        messages=read_messages(fields.get("messages")),
        tools=read_tools(fields.get("tools", []), fields.get("tool_choice", "auto")),
        add_generation_prompt=_boolean(fields, "add_generation_prompt", default=True),
        template_extras=extras,
    )


def spec_of(
    options: CompletionOptions,
    info: ModelInfo,
    weights: str | None,
    prompt: Sequence[int],
    seed: int,
    *,
    is_echoed: bool = False,
) -> SampleSpec:
    if not prompt:
        raise BadField("prompt", "has no tokens. Send at least one.")
    for name, tokens in (("prompt", prompt), ("stop_token_ids", options.stop_token_ids)):
        if (largest := max(tokens, default=0)) >= info.vocab_size:
            raise BadField(name, f"{info.name} has no token {largest}; its tokens are 0 to {info.vocab_size - 1}.")
    # The engine always samples at least one token; a completion with max_tokens=0 drops it again. The prompt of such a
    # one may fill the context, because it is only scored.
    room = info.max_context_length - len(prompt)
    max_tokens = max(room, 1) if options.max_tokens is None else options.max_tokens
    if max_tokens > room:
        raise BadField(
            "messages" if options.max_tokens is None else "max_tokens",
            f"the context of {info.name} has {info.max_context_length} tokens; this prompt has {len(prompt)} and "
            f"{max_tokens} more are requested. "
            + ("Shorten the prompt." if room < 1 else f"Shorten it, or set max_tokens to at most {room}."),
            "context_length_exceeded",
        )
    wants_logprobs = options.top_logprobs is not None
    return SampleSpec(
        base=info.name,
        weights=weights,
        prompt=tuple(prompt),
        num_samples=options.n,
        max_tokens=max(max_tokens, 1),
        **options.filters,
        seed=seed,
        stop_tokens=(() if options.ignore_eos else info.end_tokens) + options.stop_token_ids,
        stop_strings=options.stop,
        prompt_logprobs=is_echoed and wants_logprobs,
        topk_prompt=(options.top_logprobs or 0) if is_echoed else 0,
        topk_sample=options.top_logprobs or 0,
        # Alternatives and prompt log-probabilities come with the whole result, too late for tokens sent before it.
        is_streamed=options.is_streamed and not options.top_logprobs and not (is_echoed and wants_logprobs),
    )


def seeds_of(seed: int | None, prompts: int) -> list[int]:
    """Return a seed for each prompt. The same request gets the same seeds; equal prompts in it get different ones."""
    if seed is None:
        return [secrets.randbits(31) for _ in range(prompts)]
    mixed = (hashlib.sha256(f"{seed} {index}".encode()).digest()[:8] for index in range(1, prompts))
    return [seed % (1 << 63), *(int.from_bytes(digest, "little") >> 1 for digest in mixed)]


def _options(
    fields: Mapping[str, Any], default_tokens: int | None, top_logprobs: int | None, min_tokens: int
) -> CompletionOptions:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise BadField("model", "is missing. Name a base model, or a tinker://…/sampler_weights/… path.")
    limit_field = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    max_tokens = _whole_or_none(fields, limit_field, min_tokens, 1 << 30)
    filters = {"top_p": _number(fields, "top_p", 1.0, 0, 1), "top_k": _whole(fields, "top_k", -1, -1, 1 << 30) or -1}
    if filters["top_p"] == 0:  # keeps only the likeliest token
        filters = {"top_p": 1.0, "top_k": 1}
    options = fields.get("stream_options", {})
    return CompletionOptions(
        model=model,
        n=_whole(fields, "n", 1, 1, MAX_CHOICES),
        max_tokens=default_tokens if max_tokens is None else max_tokens,
        filters=filters | {name: _number(fields, name, *bounds) for name, bounds in _FILTERS.items()},
        seed=_whole_or_none(fields, "seed", -(2**63), 2**63 - 1),
        stop=_stops(fields.get("stop")),
        stop_token_ids=_tokens(_list(fields, "stop_token_ids"), "stop_token_ids"),
        ignore_eos=_boolean(fields, "ignore_eos"),
        top_logprobs=top_logprobs,
        is_streamed=_boolean(fields, "stream"),
        with_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _prompts(prompt: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise BadField("prompt", "must be text, a list of texts, a list of tokens, or a list of lists of tokens.")
    if all(isinstance(entry, str) for entry in prompt):
        return tuple(prompt)
    if all(isinstance(entry, list) for entry in prompt):
        return tuple(_tokens(entry, f"prompt[{index}]") for index, entry in enumerate(prompt))
    return (_tokens(prompt, "prompt"),)


def _tokens(entries: Sequence[object], at: str) -> tuple[int, ...]:
    tokens = []
    for entry in entries:
        if not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry < 2**31:
            raise BadField(at, f"{str(entry)[:50]!r} is not a token.")
        tokens.append(entry)
    return tuple(tokens)


def _stops(stop: object) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadField("stop", f"must be a text, or a list of at most {MAX_STOPS} texts.")
    if not all(isinstance(entry, str) and entry for entry in stops):
        raise BadField("stop", "each entry must be a text with at least one character.")
    return tuple(stops)


# ── Fields that are not supported, and how fields are read

_FILTERS: Final = {
    "temperature": (1.0, 0, 100),
    "min_p": (0.0, 0, 1),
    "repetition_penalty": (1.0, 0.01, 100),
    "presence_penalty": (0.0, -2, 2),
    "frequency_penalty": (0.0, -2, 2),
}
"""Default, minimum and maximum."""
_NO_FORMAT: Final = "output cannot be constrained to a format here"
_UNSUPPORTED: Final = {
    "logit_bias": "logits cannot be biased here",
    "min_tokens": "a minimum number of tokens is not supported here",
    "prompt_logprobs": "ask for echo and logprobs in a completion instead",
    "guided_json": _NO_FORMAT,
    "guided_regex": _NO_FORMAT,
    "guided_choice": _NO_FORMAT,
    "guided_grammar": _NO_FORMAT,
    "structured_outputs": _NO_FORMAT,
}
_UNSUPPORTED_IN_COMPLETIONS: Final = {"suffix": "text cannot be inserted here; a completion only continues its prompt"}
_UNSUPPORTED_IN_CHATS: Final = {
    "functions": "use tools",
    "function_call": "use tools and tool_choice",
    "audio": "this service returns text only",
    "web_search_options": "this service cannot search the web",
    "continue_final_message": "render the conversation yourself and send it as the prompt of a completion",
}


def _supported_fields(body: Mapping[str, Any], unsupported: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that are not null, which means absent. Raises for one that is not supported."""
    fields = {name: value for name, value in body.items() if value is not None}
    for name, reason in unsupported.items():
        if fields.get(name):
            raise BadField(name, f"not supported: {reason}.", "unsupported")
    response_format = fields.get("response_format", {"type": "text"})
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind != "text":
        raise BadField(
            "response_format",
            f"{str(kind)[:50]!r} is not supported: output is text and cannot be constrained to a format here.",
            "unsupported",
        )
    return fields


def _whole(fields: Mapping[str, Any], name: str, default: int, minimum: int, maximum: int) -> int:
    value = _whole_or_none(fields, name, minimum, maximum)
    return default if value is None else value


def _whole_or_none(fields: Mapping[str, Any], name: str, minimum: int, maximum: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise BadField(name, f"is {str(value)[:50]}; it must be a whole number from {minimum} to {maximum}.")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float, minimum: float, maximum: float) -> float:
    value = fields.get(name, default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not minimum <= value <= maximum:
        raise BadField(name, f"is {str(value)[:50]}; it must be a number from {minimum:g} to {maximum:g}.")
    return float(value)


def _boolean(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise BadField(name, f"is {str(value)[:50]}; it must be true or false.")
    return value


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name, [])
    if not isinstance(value, list):
        raise BadField(name, "must be a list.")
    return value
