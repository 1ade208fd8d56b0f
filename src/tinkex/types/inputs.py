"""Prompts (`ModelInput`) and training examples (`Datum`). Nothing here knows a dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tinkex.errors import ValidationError
from tinkex.types.base import Value, field
from tinkex.types.chunks import DmelChunk as DmelChunk
from tinkex.types.chunks import EncodedTextChunk as EncodedTextChunk
from tinkex.types.chunks import ImageAssetPointerChunk as ImageAssetPointerChunk
from tinkex.types.chunks import ImageChunk as ImageChunk
from tinkex.types.chunks import ModelInputChunk as ModelInputChunk
from tinkex.types.chunks import read_chunk as read_chunk
from tinkex.types.coerce import Mismatch, describe
from tinkex.types.packed import is_torch
from tinkex.types.tensor import TensorData

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")


class ModelInput(Value):
    """A prompt: chunks in order. Immutable: `append` and `append_int` give a new one.

    >>> ModelInput.from_ints([1, 2]).append_int(3).to_ints()
    [1, 2, 3]
    """

    chunks: list[ModelInputChunk]
    __slots__ = ("_encoded",)

    if TYPE_CHECKING:
        _encoded: dict[str, Any] = field(init=False)

        def __init__(self, *, chunks: Iterable[ModelInputChunk]) -> None: ...

    def _fill(self, given: Mapping[str, Any]) -> None:
        if given.keys() != {"chunks"}:
            return super()._fill(given)
        chunks = given["chunks"]
        if isinstance(chunks, (str, bytes, Mapping, Value)) or not hasattr(chunks, "__iter__"):
            raise ValidationError(f"ModelInput.chunks: expected a list of chunks, got {describe(chunks)}")
        read = []
        for index, chunk in enumerate(chunks):
            try:
                read.append(read_chunk(chunk))
            except Mismatch as error:
                raise ValidationError(f"ModelInput.chunks[{index}]{error.place}: {error.reason}") from None
        self._adopt(read)

    def _adopt(self, chunks: list[ModelInputChunk]) -> None:
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "_given", _CHUNKS_GIVEN)

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> Self:
        """A prompt of token ids: a list, a tuple, an array or a tensor of them."""
        chunk = EncodedTextChunk.__new__(EncodedTextChunk)
        chunk._set(tokens)
        self = cls.__new__(cls)
        self._adopt([chunk])
        return self

    @classmethod
    def from_text(cls, text: str, tokenizer: Any, *, add_special_tokens: bool = True) -> Self:
        """A prompt of plain text, exactly as given: **no chat template is applied**. For a chat, render it first.

        `tokenizer` is anything with `encode`: ours, one of the `tokenizers` library, or one of `transformers`.
        """
        encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return cls.from_ints(getattr(encoded, "ids", encoded))

    @classmethod
    def empty(cls) -> Self:
        self = cls.__new__(cls)
        self._adopt([])
        return self

    def append(self, chunk: ModelInputChunk) -> Self:
        """A new input with one more chunk."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """A new input with one more token."""
        return self.append(EncodedTextChunk(tokens=[token]))

    def to_ints(self) -> list[int]:
        """All token ids; only for an input of text alone."""
        tokens: list[int] = []
        for index, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise ValidationError(f"to_ints() needs text alone, but chunk {index} is a {type(chunk).__name__}.")
            tokens += chunk.tokens
        return tokens

    @property
    def length(self) -> int:
        """How many positions of the context the input takes."""
        return sum(chunk.length for chunk in self.chunks)

    def cached(self, name: str, make: Callable[[Self], T]) -> T:
        """Return what `make` returned for this input the first time: a prompt is encoded once, not once per request."""
        try:
            encoded = self._encoded
        except AttributeError:
            encoded = {}
            object.__setattr__(self, "_encoded", encoded)
        if name not in encoded:
            encoded[name] = make(self)
        return encoded[name]  # type: ignore[no-any-return]


_CHUNKS_GIVEN = frozenset(("chunks",))


class PromptProvenanceSpan(Value):
    """A run of tokens that were the input of a sampling request: positions [offset, offset + length) of its prompt."""

    sequence_id: str
    offset: int = 0
    length: int

    def _check(self) -> None:
        _check_span(self)


class SampledProvenanceSpan(Value):
    """A run of tokens that a sampled sequence produced: positions [offset, offset + length) of its tokens."""

    sequence_id: str
    offset: int = 0
    length: int

    def _check(self) -> None:
        _check_span(self)


def _check_span(span: PromptProvenanceSpan | SampledProvenanceSpan) -> None:
    name = type(span).__name__
    if not span.sequence_id:
        raise ValidationError(f"{name}.sequence_id is empty: pass the sequence_id of a SampledSequence")
    if span.offset < 0 or span.length < 0:
        raise ValidationError(f"{name} has offset {span.offset} and length {span.length}: neither may be negative")


ProvenanceSpans = list[PromptProvenanceSpan | SampledProvenanceSpan]

LossFnInputs = dict[str, TensorData]


class Datum(Value, kw_only=False):
    """One example to train on: what the model reads, and the tensors that the loss needs, by name.

    Lists (also nested, rectangular), numpy arrays and torch tensors become `TensorData`, which says how numbers are
    converted; the dtype follows from the key where that is a known one, else from the values.

    >>> datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0, 1]})
    >>> datum.loss_fn_inputs["weights"].dtype
    'float32'
    """

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = field(default_factory=dict)
    model_input_spans: ProvenanceSpans | None = None
    loss_fn_input_spans: ProvenanceSpans | None = None

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[
            str, TensorData | Sequence[float] | Sequence[Sequence[float]] | np.ndarray[Any, Any] | torch.Tensor
        ] = {},
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "model_input", _read(ModelInput, "model_input", model_input))
        if not isinstance(loss_fn_inputs, Mapping):
            raise ValidationError(f"Datum.loss_fn_inputs: expected a mapping, got {describe(loss_fn_inputs)}")
        put(self, "loss_fn_inputs", {key: _tensor(key, value) for key, value in loss_fn_inputs.items()})
        put(self, "model_input_spans", _spans("model_input_spans", model_input_spans))
        put(self, "loss_fn_input_spans", _spans("loss_fn_input_spans", loss_fn_input_spans))
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise ValidationError("Datum: pass both model_input_spans and loss_fn_input_spans, or neither")
        put(self, "_given", _DATUM if model_input_spans is None else _DATUM_WITH_SPANS)

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Self:
        """A copy that says where its tokens came from: runs that tile the input, and runs that tile `target_tokens`."""
        _check_tiling("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and (targets.shape is None or len(targets.shape) == 1):
            _check_tiling("target_tokens", loss_fn_inputs, targets.size)
        return type(self)(self.model_input, self.loss_fn_inputs, model_input, loss_fn_inputs)


_DATUM = frozenset(("model_input", "loss_fn_inputs"))
_DATUM_WITH_SPANS = frozenset((*_DATUM, "model_input_spans", "loss_fn_input_spans"))


def _read(kind: type[ModelInput], field: str, value: Any) -> ModelInput:
    try:
        return kind._coerce(value)
    except Mismatch as error:
        raise ValidationError(f"Datum.{field}: {error.reason}") from None


def _tensor(key: Any, value: Any) -> TensorData:
    if isinstance(value, TensorData):
        return value
    if not isinstance(key, str):
        raise ValidationError(f"Datum.loss_fn_inputs: a key is a str, got {describe(key)}")
    try:
        if isinstance(value, Mapping):
            return TensorData.model_validate(value)
        # Padded 2-D targets and their weights are mostly padding; lists and arrays stay as the caller laid them out.
        if key in ("target_tokens", "weights") and is_torch(value) and value.ndim == 2:
            return TensorData.from_torch_sparse(value, key=key)
        return TensorData.from_list(value, key)
    except ValidationError as error:
        raise ValidationError(f"Datum.{error}") from None


def _spans(name: str, spans: Any) -> ProvenanceSpans | None:
    if spans is None:
        return None
    for index, span in enumerate(spans):
        if not isinstance(span, (PromptProvenanceSpan, SampledProvenanceSpan)):
            raise ValidationError(
                f"Datum.{name}[{index}]: expected PromptProvenanceSpan or SampledProvenanceSpan, got {describe(span)}"
            )
    return list(spans)


def _check_tiling(field: str, spans: ProvenanceSpans, length: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise ValidationError(f"with_provenance: the spans cover {covered} positions, but {field} has {length}")
