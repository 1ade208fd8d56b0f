"""Sampling: parameters, the request, and the sequences that come back.

A response keeps the packed numbers as they arrived; the lists (`tokens`, `logprobs`) are made on first use and then
kept, and the `*_np` arrays look at the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from tinkex.types.base import ABSENT, Value, field
from tinkex.types.inputs import ModelInput
from tinkex.types.packed import Buffer, array_over, pack_floats, pack_tokens, unpack
from tinkex.types.tensor import TensorData
from tinkex.types.topk import TopkList, TopkLogprobs

if TYPE_CHECKING:
    import numpy as np

StopReason = Literal["length", "stop"]

# What other servers of this API, and the OpenAI-like ones behind them, say instead.
_LENGTH_WORDS = frozenset(("length", "max_tokens", "max_length"))


def parse_stop_reason(word: object) -> StopReason:
    """Read any server's word for why a sequence ended: `length` if a limit was hit, else `stop`. Never fails."""
    return "length" if str(word).lower() in _LENGTH_WORDS else "stop"


class SamplingParams(Value):
    """How to sample. None means that the service decides; a service that lacks one of the last four rejects it."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1
    top_k: int = -1
    top_p: float = 1
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def _fill(self, given: Mapping[str, Any]) -> None:
        unknown = given.keys() - self._defaults.keys()
        if unknown:
            # The official client drops these in silence, so programs that pass them exist and must go on.
            import warnings

            warnings.warn(f"SamplingParams ignores {', '.join(sorted(unknown))}: no such parameter", stacklevel=3)
            given = {name: value for name, value in given.items() if name not in unknown}
        super()._fill(given)


class SampleRequest(Value):
    """One sampling request, addressed by sampling session and seq_id, by base model, or by the path of weights."""

    num_samples: int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class PromptAltTokens(Value, kw_only=False):
    """Tokens drawn at every prompt position after the first, and their log-probabilities: two tensors [n - 1, k]."""

    tokens: TensorData
    logprobs: TensorData


class SampledSequence(Value):
    """One sequence that the model produced. `raw_stop_reason` is the server's own word."""

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float] | None = None
    sequence_id: str = ""
    topk_logprobs: TopkList | None = None
    raw_stop_reason: str | None = None
    __slots__ = ("_logprobs", "_tokens", "_topk")

    if TYPE_CHECKING:
        _tokens: Buffer = field(init=False)
        _logprobs: Buffer = field(init=False)
        _topk: TopkLogprobs = field(init=False)

    else:

        def __getattr__(self, name: str) -> Any:
            # Reached when a slot is empty: lists are made from the packed numbers on first use, then kept.
            if name == "tokens":
                values = unpack("i", self._tokens)
            elif name == "logprobs":
                values = unpack("f", self._logprobs)
            elif name == "topk_logprobs":
                values = self._topk.to_lists()
            else:
                raise AttributeError(f"SampledSequence has no attribute {name!r}")
            object.__setattr__(self, name, values)
            return values

    def __init__(
        self,
        stop_reason: str,
        sequence_id: str = ABSENT,
        tokens_np: Any = None,
        logprobs_np: Any = None,
        topk_logprobs_np: TopkLogprobs | None = None,
        _tokens_list: Iterable[int] | None = None,
        _logprobs_list: Iterable[float] | None = None,
        _topk_logprobs_list: TopkList | None = None,
        *,
        tokens: Iterable[int] = ABSENT,
        logprobs: Iterable[float] | None = ABSENT,
        topk_logprobs: TopkList | None = ABSENT,
        raw_stop_reason: str | None = None,
    ) -> None:
        """Lists or arrays: both ways of the official releases are taken."""
        topk_np = None if topk_logprobs_np is None else topk_logprobs_np.to_lists()
        given = {
            "stop_reason": parse_stop_reason(stop_reason),
            "tokens": _first(_tokens_list, tokens_np, tokens),
            "logprobs": _first(_logprobs_list, logprobs_np, logprobs),
            "sequence_id": sequence_id,
            "topk_logprobs": _first(_topk_logprobs_list, topk_np, topk_logprobs),
        }
        self._fill({name: value for name, value in given.items() if value is not ABSENT})
        object.__setattr__(self, "raw_stop_reason", raw_stop_reason or str(stop_reason))
        if self.raw_stop_reason != self.stop_reason:
            object.__setattr__(self, "_given", self._given | {"raw_stop_reason"})

    @classmethod
    def from_buffers(
        cls,
        stop_reason: str,
        tokens: Buffer,
        logprobs: Buffer | None = None,
        sequence_id: str = "",
        topk_logprobs: TopkLogprobs | None = None,
    ) -> Self:
        """Over packed little-endian int32 tokens and float32 log-probabilities, which are not copied."""
        self = cls.__new__(cls)
        put = object.__setattr__
        word = parse_stop_reason(stop_reason)
        put(self, "stop_reason", word)
        put(self, "raw_stop_reason", stop_reason)
        put(self, "sequence_id", sequence_id)
        put(self, "_tokens", tokens)
        given = {"stop_reason", "tokens"}
        if word != stop_reason:
            given.add("raw_stop_reason")
        if sequence_id:
            given.add("sequence_id")
        for name, slot, packed in (("logprobs", "_logprobs", logprobs), ("topk_logprobs", "_topk", topk_logprobs)):
            if packed is None:
                put(self, name, None)
            else:
                put(self, slot, packed)
                given.add(name)
        put(self, "_given", frozenset(given))
        return self

    @property
    def tokens_np(self) -> np.ndarray[Any, Any]:
        """The tokens as an int32 array (read-only)."""
        packed = getattr(self, "_tokens", None)
        return array_over(pack_tokens(self.tokens) if packed is None else packed, "<i4", "tokens_np")

    @property
    def logprobs_np(self) -> np.ndarray[Any, Any] | None:
        """The log-probabilities as a float32 array (read-only)."""
        packed = getattr(self, "_logprobs", None)
        if packed is None and self.logprobs is not None:
            packed = pack_floats(self.logprobs)
        return None if packed is None else array_over(packed, "<f4", "logprobs_np")

    @property
    def topk_logprobs_np(self) -> TopkLogprobs | None:
        """The likeliest tokens at each position as two matrices."""
        topk = getattr(self, "_topk", None)
        return topk if topk is not None or self.topk_logprobs is None else TopkLogprobs.from_lists(self.topk_logprobs)


class SampleResponse(Value):
    """The sequences, and what was asked for about the prompt. `prompt_logprobs` has None where there is no value."""

    sequences: list[SampledSequence]
    type: Literal["sample"] = "sample"
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: TopkList | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None
    __slots__ = ("_prompt_logprobs", "_topk")

    if TYPE_CHECKING:
        _prompt_logprobs: Buffer = field(init=False)
        _topk: TopkLogprobs = field(init=False)

    else:

        def __getattr__(self, name: str) -> Any:
            # Reached when a slot is empty: lists are made from the packed numbers on first use, then kept.
            if name == "prompt_logprobs":
                values = nan_to_none(unpack("f", self._prompt_logprobs))
            elif name == "topk_prompt_logprobs":
                values = self._topk.to_lists()
            else:
                raise AttributeError(f"SampleResponse has no attribute {name!r}")
            object.__setattr__(self, name, values)
            return values

    def __init__(
        self,
        sequences: Iterable[SampledSequence],
        prompt_logprobs_np: Any = None,
        topk_prompt_logprobs_np: TopkLogprobs | None = None,
        target_prompt_logprobs: TensorData | None = ABSENT,
        prompt_cache_hit_tokens: int = ABSENT,
        prompt_alt_tokens: PromptAltTokens | None = ABSENT,
        _prompt_logprobs_list: Iterable[float | None] | None = None,
        _topk_prompt_logprobs_list: TopkList | None = None,
        *,
        prompt_logprobs: Iterable[float | None] | None = ABSENT,
        topk_prompt_logprobs: TopkList | None = ABSENT,
        type: Literal["sample"] = ABSENT,
    ) -> None:
        """Lists or arrays: both ways of the official releases are taken."""
        listed = None if prompt_logprobs_np is None else nan_to_none(prompt_logprobs_np.tolist())
        topk_np = None if topk_prompt_logprobs_np is None else topk_prompt_logprobs_np.to_lists()
        given = {
            "sequences": sequences,
            "type": type,
            "prompt_logprobs": _first(_prompt_logprobs_list, listed, prompt_logprobs),
            "topk_prompt_logprobs": _first(_topk_prompt_logprobs_list, topk_np, topk_prompt_logprobs),
            "target_prompt_logprobs": target_prompt_logprobs,
            "prompt_cache_hit_tokens": prompt_cache_hit_tokens,
            "prompt_alt_tokens": prompt_alt_tokens,
        }
        self._fill({name: value for name, value in given.items() if value is not ABSENT})

    @classmethod
    def from_buffers(
        cls,
        sequences: list[SampledSequence],
        prompt_logprobs: Buffer | None = None,
        topk_prompt_logprobs: TopkLogprobs | None = None,
        target_prompt_logprobs: TensorData | None = None,
        prompt_cache_hit_tokens: int = 0,
        prompt_alt_tokens: PromptAltTokens | None = None,
    ) -> Self:
        """Over packed little-endian float32 (NaN: no value), which are not copied."""
        self = cls.__new__(cls)
        put = object.__setattr__
        put(self, "sequences", sequences)
        put(self, "type", "sample")
        put(self, "prompt_cache_hit_tokens", prompt_cache_hit_tokens)
        put(self, "target_prompt_logprobs", target_prompt_logprobs)
        put(self, "prompt_alt_tokens", prompt_alt_tokens)
        put(self, *(("prompt_logprobs", None) if prompt_logprobs is None else ("_prompt_logprobs", prompt_logprobs)))
        put(
            self, *(("topk_prompt_logprobs", None) if topk_prompt_logprobs is None else ("_topk", topk_prompt_logprobs))
        )
        extras = {
            "prompt_logprobs": prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "target_prompt_logprobs": target_prompt_logprobs,
            "prompt_cache_hit_tokens": prompt_cache_hit_tokens or None,
            "prompt_alt_tokens": prompt_alt_tokens,
        }
        put(self, "_given", frozenset(("sequences", *(name for name, value in extras.items() if value is not None))))
        return self

    @property
    def prompt_logprobs_np(self) -> np.ndarray[Any, Any] | None:
        """The prompt's log-probabilities as a float32 array (read-only), NaN where there is no value."""
        packed = getattr(self, "_prompt_logprobs", None)
        if packed is None and self.prompt_logprobs is not None:
            packed = pack_prompt_logprobs(self.prompt_logprobs)
        return None if packed is None else array_over(packed, "<f4", "prompt_logprobs_np")

    @property
    def topk_prompt_logprobs_np(self) -> TopkLogprobs | None:
        """The likeliest tokens at each prompt position as two matrices."""
        topk = getattr(self, "_topk", None)
        if topk is None and self.topk_prompt_logprobs is not None:
            return TopkLogprobs.from_lists(self.topk_prompt_logprobs)
        return topk


def pack_prompt_logprobs(values: Sequence[float | None]) -> bytes:
    """Float32 with NaN where there is no value, as the wire has it."""
    nan = float("nan")
    return pack_floats([nan if value is None else value for value in values])


def nan_to_none(values: Iterable[float]) -> list[float | None]:
    return [None if value != value else value for value in values]  # only NaN differs from itself


def _first(*forms: Any) -> Any:
    """The form that was given; the last one is the field itself, which may be given as None."""
    return next((form for form in forms[:-1] if form is not None), forms[-1])
