"""The ranges of all numbers that a caller may choose.

A limit is universal (a learning rate that destroys the weights) or a service's own. For the
second kind the function takes the bound as an argument: a client that talks to another service does not pass it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, NoReturn

from tinkex.errors import ValidationError
from tinkex.types.coerce import describe
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensor import TensorData

BASE_MAX_RANK: Final = 512
"""Allowed on every model. A wider model allows its own width; beyond both, a rank only costs memory."""
MAX_DATUMS: Final = 1024
"""Datums of one training call to our service. Clients ask for this number and split larger calls."""
MAX_SAMPLES: Final = 1024
"""Samples of one request to our service."""
MAX_TOPK: Final = 1024
"""Ranked tokens per position from our service."""
MAX_TARGETS: Final = 2**26
"""Targets of one training call that our engine takes, sparse ones counted as if dense: 256 MB of log-probabilities
return. A service allows as many or fewer (its setting `max_targets`)."""
MAX_PENALTY: Final = 100.0
REPETITION_PENALTY: Final = (1e-3, 1e3)


def reject(where: str, why: str, code: str) -> NoReturn:
    """Raise the error of a broken rule: one sentence whose subject is the place, and what to do."""
    raise ValidationError(f"{where} {why}", code)


# -- optimizer --------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """A closed range and how messages describe it."""

    least: float
    most: float
    rule: str


_BELOW_1: Final = math.nextafter(1.0, 0.0)
_BELOW_INFINITY: Final = math.nextafter(math.inf, 0.0)
_LARGE: Final = 1e4
"""Far beyond any use; it keeps one step from driving the weights out of float32, from where no step leads back."""
ADAMW: Final[Mapping[str, Range]] = {
    "learning_rate": Range(0.0, _LARGE, "a number from 0 to 10,000"),
    "beta1": Range(0.0, _BELOW_1, "at least 0 and below 1"),
    "beta2": Range(0.0, _BELOW_1, "at least 0 and below 1"),
    # Many gradients are exactly 0 in the first step (those of A, because B is 0), and 0/0 would spoil the weights.
    "eps": Range(1e-20, 1.0, "from 1e-20 to 1"),
    "weight_decay": Range(0.0, _LARGE, "a number from 0 to 10,000"),
    "grad_clip_norm": Range(0.0, _BELOW_INFINITY, "0 (off) or a positive number"),
}
"""The settings of one AdamW step. What lies outside can only destroy the weights."""


def check_adamw(settings: Mapping[str, object], where: str = "AdamParams") -> None:
    """Reject settings of an optimizer step that can only destroy the weights. Absent ones have their default."""
    for name, (least, most, rule) in ADAMW.items():
        value = settings.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # type: ignore[operator]  # it is a number by now
            reject(f"{where}.{name}", f"is {str(value)[:100]}; it must be {rule}.", "bad_adam_params")
    rate, decay = settings.get("learning_rate"), settings.get("weight_decay")
    if isinstance(rate, (int, float)) and isinstance(decay, (int, float)) and rate * decay > 1:
        reject(
            where,
            f"has learning_rate {rate} times weight_decay {decay}, which is above 1: the step would flip the sign of "
            "every weight. Lower one of them.",
            "bad_adam_params",
        )


# -- LoRA -------------------------------------------------------------------------------------------------------------


def check_rank(rank: int, model: str = "", hidden_size: int | None = None) -> None:
    """Reject a LoRA rank below 1 and, where the width of the model is known, one above what it allows."""
    if rank < 1:
        reject("rank", f"is {rank}; it must be at least 1.", "bad_rank")
    if hidden_size is not None and rank > (most := max(BASE_MAX_RANK, hidden_size)):
        reject("rank", f"is {rank}; {model} allows 1 to {most}.", "bad_rank")


def check_lora(
    rank: int,
    *,
    train_attn: bool,
    train_mlp: bool,
    train_unembed: bool,
    model: str = "",
    hidden_size: int | None = None,
) -> None:
    """Reject an adapter that has no rank or acts on no layer and, with the model's width, one of too high a rank."""
    check_rank(rank)
    if not (train_attn or train_mlp or train_unembed):
        raise ValidationError(
            "There is nothing to train: set at least one of train_attn, train_mlp or train_unembed to True.",
            "nothing_to_train",
        )
    check_rank(rank, model, hidden_size)


# -- sampling ---------------------------------------------------------------------------------------------------------


def check_sample(
    tokens: int | None,
    num_samples: int,
    params: SamplingParams,
    *,
    has_prompt_logprobs: bool = False,
    topk_prompt_logprobs: int = 0,
    topk_sample_logprobs: int = 0,
    target_prompt_logprobs: TensorData | None = None,
    prompt_alt_tokens_k: int = 0,
    prompt_logprobs_last_n: int | None = None,
    max_samples: int | None = None,
    max_topk: int | None = None,
) -> None:
    """Reject a request to sample that no service could serve, or, with its limits, that ours does not.

    `tokens` is the length of the prompt, None if only the service knows it.
    """
    check_count("num_samples", num_samples, 1, max_samples)
    check_length("prompt", tokens)
    check_sampling_params(params)
    if topk_prompt_logprobs or topk_sample_logprobs or prompt_alt_tokens_k:
        check_count("topk_prompt_logprobs", topk_prompt_logprobs, 0, max_topk)
        check_count("topk_sample_logprobs", topk_sample_logprobs, 0, max_topk)
        check_count("prompt_alt_tokens_k", prompt_alt_tokens_k, 0, max_topk)
    if prompt_logprobs_last_n is not None:
        _check_last_n(prompt_logprobs_last_n, has_prompt_logprobs)
    if target_prompt_logprobs is not None:
        _check_prompt_targets(target_prompt_logprobs, tokens)


def check_sampling_params(params: SamplingParams) -> None:
    """Reject sampling parameters that no service could use. None leaves the choice to the service."""
    # Written as `not (good)` so that NaN, which compares false with everything, is rejected too.
    if params.max_tokens is not None and params.max_tokens < 1:
        reject("max_tokens", f"is {params.max_tokens}; it must be at least 1.", "bad_max_tokens")
    if not 0 <= params.temperature < math.inf:
        reject("temperature", f"is {params.temperature}; it must be 0 (greedy) or more.", "bad_temperature")
    if not 0 < params.top_p <= 1:
        reject("top_p", f"is {params.top_p}; it must be above 0 and at most 1 (1 keeps every token).", "bad_top_p")
    if params.top_k != -1 and params.top_k < 1:
        reject("top_k", f"is {params.top_k}; it must be at least 1, or -1 for no limit.", "bad_top_k")
    if params.stop is not None:
        _check_stop(params.stop)
    if params.min_p is not None and not 0 <= params.min_p <= 1:
        reject("min_p", f"is {params.min_p}; it must be from 0 to 1.", "bad_min_p")
    if params.repetition_penalty is not None:
        least, most = REPETITION_PENALTY
        if not least <= params.repetition_penalty <= most:
            reject(
                "repetition_penalty",
                f"is {params.repetition_penalty}; it must be from {least:g} to {most:g} (1 is none).",
                "bad_repetition_penalty",
            )
    if params.presence_penalty is not None:
        _check_penalty("presence_penalty", params.presence_penalty)
    if params.frequency_penalty is not None:
        _check_penalty("frequency_penalty", params.frequency_penalty)


def _check_penalty(name: str, penalty: float) -> None:
    if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
        reject(name, f"is {penalty}; it must be from -{MAX_PENALTY:g} to {MAX_PENALTY:g} (0 is none).", f"bad_{name}")


def _check_stop(stop: str | Sequence[str] | Sequence[int]) -> None:
    for entry in (stop,) if isinstance(stop, str) else stop:
        if entry == "":
            reject("stop", "has an empty text, which matches everywhere. Remove it; [] disables stopping.", "bad_stop")
        if isinstance(entry, int) and entry < 0:
            reject("stop", f"has the token {entry}; token ids are not negative.", "bad_stop")


def check_seed(seed: int | None) -> None:
    """Reject a seed that does not fit the int64 of other services. Ours takes any whole number, modulo 2^63."""
    if seed is not None and not -(2**63) <= seed < 2**63:
        reject("seed", f"is {seed}; it must fit 64 bits.", "bad_seed")


def check_count(name: str, value: object, least: int = 0, most: int | None = None) -> int:
    """Return a whole number of things. `most` is a limit of one service."""
    if type(value) is not int or value < least:
        reject(name, f"must be a whole number from {least}, got {describe(value)}.", f"bad_{name}")
    if most is not None and value > most:
        reject(name, f"is {value}; this service allows at most {most}.", f"bad_{name}")
    return value


def _check_last_n(last_n: int, has_prompt_logprobs: bool) -> None:
    if type(last_n) is not int or last_n < 1:
        reject("prompt_logprobs_last_n", f"must be a whole number from 1, got {describe(last_n)}.", "bad_last_n")
    if not has_prompt_logprobs:
        reject(
            "prompt_logprobs_last_n",
            "selects among the prompt's log-probabilities. Ask for those too (include_prompt_logprobs=True).",
            "bad_last_n",
        )


def _check_prompt_targets(targets: TensorData, tokens: int | None) -> None:
    """Check the form of `target_prompt_logprobs`: K token ids for every prompt token after the first."""
    shape = targets.shape
    if targets.dtype != "int64":
        reject("target_prompt_logprobs", f"is {targets.dtype}; it holds token ids. Pass int64.", "bad_targets")
    if shape is None or len(shape) != 2 or (tokens is not None and shape[0] != tokens - 1):
        rows = "len(prompt) - 1" if tokens is None else f"len(prompt) - 1 = {tokens - 1}"
        reject("target_prompt_logprobs", f"has shape {shape}; it must be 2-D, [{rows}, K].", "bad_targets")


# -- tokens -----------------------------------------------------------------------------------------------------------


def check_length(where: str, tokens: int | None, model: str = "", max_context_length: int | None = None) -> None:
    """Reject an input without tokens and, where the model is known, one beyond its context. None: length unknown."""
    if tokens is None:
        return
    if tokens == 0:
        reject(where, "is empty. Give it at least one token, for instance the model's start token.", "empty_input")
    if max_context_length is not None and tokens > max_context_length:
        reject(
            where,
            f"has {tokens} tokens, but the context of {model} takes at most {max_context_length}. Shorten it.",
            "context_exceeded",
        )


def unknown_token_error(where: str, position: int, token: int, model: str, vocab_size: int) -> ValidationError:
    """Make the error for a token that the model does not have. Finding it needs numpy or torch, so callers do that."""
    return ValidationError(
        f"{where}: entry {position} is token {token}; {model} has tokens 0 to {vocab_size - 1}. Encode the text with "
        "this model's own tokenizer.",
        "unknown_token",
    )
