"""Sampling: parameters, the request, and the sequences that come back.

A response keeps the packed numbers as they arrived; the lists (`tokens`, `logprobs`) are made on first use and then
kept, and the `*_np` arrays look at the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from tinkex.errors import ValidationError
from tinkex.types.base import ABSENT, LazyValue, Value, field
from tinkex.types.inputs import ModelInput
from tinkex.types.packed import Buffer, array_over, pack_floats, pack_tokens, unpack
from tinkex.types.tensor import TensorData

if TYPE_CHECKING:
    import numpy as np

PackedT = TypeVar("PackedT")
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


TopkList = list[list[tuple[int, float]] | None]


class TopkLogprobs(Value, kw_only=False):
    """The k likeliest tokens at each position: two matrices of `length` rows and k columns.

    A row with fewer than k entries ends in fillers (token 0, log-probability -99999).
    """

    length: int
    k: int
    _token_ids: Buffer = field(init=False)
    _logprobs: Buffer = field(init=False)
    FILLER = -99999.0

    def __init__(self, token_ids: Any, logprobs: Any) -> None:
        """Two matrices (arrays or nested lists) of one shape."""
        ids, values = TensorData(token_ids, "int64"), TensorData(logprobs, "float32")
        length, k = ids.shape if ids.shape is not None and len(ids.shape) == 2 else (len(ids), 0)
        self._set(pack_tokens(ids.data), values.buffer, length, k)

    def _set(self, token_ids: Buffer, logprobs: Buffer, length: int, k: int) -> None:
        if not len(token_ids) == len(logprobs) == 4 * length * k or length < 0:
            raise ValidationError(
                f"TopkLogprobs: {len(token_ids) // 4} ids and {len(logprobs) // 4} values are not {length} x {k}"
            )
        put = object.__setattr__
        put(self, "length", length)
        put(self, "k", k)
        put(self, "_token_ids", token_ids)
        put(self, "_logprobs", logprobs)
        put(self, "_given", frozenset(("length", "k")))

    @classmethod
    def from_buffers(cls, token_ids: Buffer, logprobs: Buffer, length: int, k: int) -> Self:
        """Over packed little-endian int32 and float32, which are not copied."""
        self = cls.__new__(cls)
        self._set(token_ids, logprobs, length, k)
        return self

    @classmethod
    def from_lists(cls, rows: TopkList) -> Self:
        """From a list per position, or None where nothing is known."""
        k = max((len(row) for row in rows if row), default=0)
        padded = [list(row or ()) + [(0, cls.FILLER)] * (k - len(row or ())) for row in rows]
        flat = [entry for row in padded for entry in row]
        ids, values = [entry[0] for entry in flat], [entry[1] for entry in flat]
        return cls.from_buffers(pack_tokens(ids), pack_floats(values), len(rows), k)

    def to_lists(self) -> TopkList:
        """For each position up to k pairs (token, log-probability), or None where nothing was reported."""
        pairs = list(zip(unpack("i", self._token_ids), unpack("f", self._logprobs), strict=True))
        filler = (0, self.FILLER)
        rows: TopkList = []
        for start in range(0, self.length * self.k, self.k or 1):
            row = pairs[start : start + self.k]
            while row and row[-1] == filler:
                row.pop()
            rows.append(row or None)
        return rows

    @property
    def token_ids(self) -> np.ndarray[Any, Any]:
        return array_over(self._token_ids, "<i4", "TopkLogprobs").reshape(self.length, self.k)

    @property
    def logprobs(self) -> np.ndarray[Any, Any]:
        return array_over(self._logprobs, "<f4", "TopkLogprobs").reshape(self.length, self.k)

    def packed(self) -> tuple[Buffer, Buffer]:
        """Token ids as int32 and log-probabilities as float32."""
        return self._token_ids, self._logprobs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopkLogprobs):
            return NotImplemented
        return (self.length, self.k, self.packed()) == (other.length, other.k, other.packed())

    def __hash__(self) -> int:
        return hash((bytes(self._token_ids), bytes(self._logprobs)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_buffers, (bytes(self._token_ids), bytes(self._logprobs), self.length, self.k)


class SampledSequence(LazyValue):
    """One sequence that the model produced. `raw_stop_reason` is the server's own word."""

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float] | None = None
    sequence_id: str = ""
    topk_logprobs: TopkList | None = None
    raw_stop_reason: str | None = None
    _tokens: Buffer = field(init=False)
    _logprobs: Buffer | None = field(init=False)
    _topk: TopkLogprobs | None = field(init=False)
    _makers: ClassVar = {
        "tokens": lambda self: unpack("i", self._tokens),
        "logprobs": lambda self: unpack("f", self._logprobs),
        "topk_logprobs": lambda self: self._topk.to_lists(),
    }

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
            put(self, slot, packed)
            if packed is None:
                put(self, name, None)
            else:
                given.add(name)
        put(self, "_given", frozenset(given))
        return self

    def packed_tokens(self) -> Buffer:
        """The tokens as little-endian int32."""
        return _packed(self, "_tokens", "tokens", pack_tokens)

    def packed_logprobs(self) -> Buffer | None:
        """The log-probabilities as little-endian float32."""
        return _packed(self, "_logprobs", "logprobs", pack_floats)

    @property
    def tokens_np(self) -> np.ndarray[Any, Any]:
        """The tokens as an int32 array (read-only)."""
        return array_over(self.packed_tokens(), "<i4", "tokens_np")

    @property
    def logprobs_np(self) -> np.ndarray[Any, Any] | None:
        """The log-probabilities as a float32 array (read-only)."""
        packed = self.packed_logprobs()
        return None if packed is None else array_over(packed, "<f4", "logprobs_np")

    @property
    def topk_logprobs_np(self) -> TopkLogprobs | None:
        """The likeliest tokens at each position as two matrices."""
        return _packed(self, "_topk", "topk_logprobs", TopkLogprobs.from_lists)


class SampleResponse(LazyValue):
    """The sequences, and what was asked for about the prompt. `prompt_logprobs` has None where there is no value."""

    sequences: list[SampledSequence]
    type: Literal["sample"] = "sample"
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: TopkList | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None
    _prompt_logprobs: Buffer = field(init=False)
    _topk: TopkLogprobs = field(init=False)
    _makers: ClassVar = {
        "prompt_logprobs": lambda self: _nan_to_none(unpack("f", self._prompt_logprobs)),
        "topk_prompt_logprobs": lambda self: self._topk.to_lists(),
    }

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
        listed = None if prompt_logprobs_np is None else _nan_to_none(prompt_logprobs_np.tolist())
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
        put(self, "prompt_logprobs" if prompt_logprobs is None else "_prompt_logprobs", prompt_logprobs)
        put(self, "topk_prompt_logprobs" if topk_prompt_logprobs is None else "_topk", topk_prompt_logprobs)
        extras = {
            "prompt_logprobs": prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "target_prompt_logprobs": target_prompt_logprobs,
            "prompt_cache_hit_tokens": prompt_cache_hit_tokens or None,
            "prompt_alt_tokens": prompt_alt_tokens,
        }
        put(self, "_given", frozenset(("sequences", *(name for name, value in extras.items() if value is not None))))
        return self

    def packed_prompt_logprobs(self) -> Buffer | None:
        """The prompt's log-probabilities as little-endian float32, NaN where there is no value."""
        return _packed(self, "_prompt_logprobs", "prompt_logprobs", pack_prompt_logprobs)

    @property
    def prompt_logprobs_np(self) -> np.ndarray[Any, Any] | None:
        """The prompt's log-probabilities as a float32 array (read-only), NaN where there is no value."""
        packed = self.packed_prompt_logprobs()
        return None if packed is None else array_over(packed, "<f4", "prompt_logprobs_np")

    @property
    def topk_prompt_logprobs_np(self) -> TopkLogprobs | None:
        """The likeliest tokens at each prompt position as two matrices."""
        return _packed(self, "_topk", "topk_prompt_logprobs", TopkLogprobs.from_lists)


def pack_prompt_logprobs(values: Sequence[float | None]) -> bytes:
    """Float32 with NaN where there is no value, as the wire has it."""
    nan = float("nan")
    return pack_floats([nan if value is None else value for value in values])


def _packed(value: SampledSequence | SampleResponse, slot: str, field: str, pack: Callable[[Any], PackedT]) -> PackedT:
    """Return what came packed as it came: asking for the list would make it. What came as a list is packed."""
    packed: Any = getattr(value, slot, None)
    if packed is None and (listed := getattr(value, field)) is not None:
        return pack(listed)
    return packed  # type: ignore[no-any-return]


def _nan_to_none(values: Iterable[float]) -> list[float | None]:
    return [None if value != value else value for value in values]  # only NaN differs from itself


def _first(*forms: Any) -> Any:
    """The form that was given; the last one is the field itself, which may be given as None."""
    return next((form for form in forms[:-1] if form is not None), forms[-1])
