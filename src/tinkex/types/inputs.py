"""Prompts (`ModelInput`), their chunks, and training examples (`Datum`). Nothing here knows a dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, get_args

from tinkex.errors import ValidationError
from tinkex.types.base import LazyValue, Value, field
from tinkex.types.coerce import Mismatch, describe, entries
from tinkex.types.packed import Buffer, is_torch, pack_tokens, unpack
from tinkex.types.tensor import TensorData

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")


class EncodedTextChunk(LazyValue):
    """A run of token ids. Kept packed (int32); the list is made on first use.

    >>> EncodedTextChunk(tokens=[3, 1, 4]).length
    3
    """

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"
    _packed: Buffer = field(init=False)
    _makers: ClassVar = {"tokens": lambda self: unpack("i", self._packed)}

    if TYPE_CHECKING:

        def __init__(self, *, tokens: Iterable[int], type: Literal["encoded_text"] = "encoded_text") -> None: ...

    def _fill(self, given: Mapping[str, Any]) -> None:
        if given.keys() != _TOKENS and (given.keys() != _TYPED_TOKENS or given["type"] != "encoded_text"):
            super()._fill(given)  # rejects a wrong name or type
        self._set(given["tokens"])
        if "type" in given:
            object.__setattr__(self, "_given", frozenset(given))

    def _set(self, tokens: Any) -> None:
        try:
            packed = pack_tokens(entries(tokens, "a list of numbers"))
        except Mismatch as error:
            raise ValidationError(f"EncodedTextChunk.tokens{error.place}: {error.reason}") from None
        self._adopt(packed)

    def _adopt(self, packed: Buffer) -> None:
        put = object.__setattr__
        put(self, "_packed", packed)
        put(self, "type", "encoded_text")
        put(self, "_given", _TOKENS)

    @classmethod
    def from_packed(cls, packed: Buffer) -> Self:
        """A chunk over packed little-endian int32 token ids, which are not copied."""
        if len(packed) % 4:
            raise ValidationError(f"EncodedTextChunk: {len(packed)} bytes are not a whole number of int32 token ids")
        self = cls.__new__(cls)
        self._adopt(packed)
        return self

    def packed(self) -> Buffer:
        """The token ids as little-endian int32."""
        return self._packed

    @property
    def length(self) -> int:
        return len(self.packed()) // 4

    def __eq__(self, other: object) -> bool:
        return self.packed() == other.packed() if isinstance(other, EncodedTextChunk) else NotImplemented

    def __hash__(self) -> int:
        return hash(bytes(self.packed()))


_TOKENS = frozenset(("tokens",))
_TYPED_TOKENS = frozenset(("tokens", "type"))


def room_of(image: ImageChunk | ImageAssetPointerChunk) -> int | None:
    """The positions of the context that an image takes, if the caller said so in a newer or an older field."""
    return image.expected_tokens if image.expected_tokens is not None else image.tokens


def _known_room(image: ImageChunk | ImageAssetPointerChunk) -> int:
    room = room_of(image)
    if room is None:
        raise ValidationError(f"The length of this {type(image).__name__} is unknown: pass expected_tokens=...")
    return room


class ImageChunk(Value):
    """An image inside the input. `expected_tokens` (older services: `tokens`) is the room it takes."""

    data: bytes
    format: Literal["png", "jpeg"]
    height: int | None = None
    tokens: int | None = None
    width: int | None = None
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    @property
    def length(self) -> int:
        return _known_room(self)


class ImageAssetPointerChunk(Value):
    """An image that the service already holds, by its location."""

    format: Literal["png", "jpeg"]
    height: int | None = None
    location: str
    tokens: int | None = None
    width: int | None = None
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        return _known_room(self)


class DmelChunk(Value):
    """Audio, as a serialised tensor of dMel tokens."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        """The first extent of the tensor, read from its header."""
        return _first_extent(self.dmel)


def _first_extent(dmel: bytes) -> int:
    # The header: an optional byte 254 (all entries equal), the dtype (0 to 7), then, as varints, the number of extents
    # and the extents themselves.
    at = 1 if dmel[:1] == b"\xfe" else 0
    if at >= len(dmel) or dmel[at] > 7:
        raise ValidationError("DmelChunk.dmel does not start like a serialised tensor, so its length is unknown.")
    dimensions, at = _varint(dmel, at + 1)
    if dimensions == 0:
        raise ValidationError("DmelChunk.dmel holds a single number, not a sequence of frames.")
    return _varint(dmel, at)[0]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        number |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return number, at
    raise ValidationError("DmelChunk.dmel ends inside its header, so its length is unknown.")


ModelInputChunk = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk

_CHUNK_KINDS: tuple[type[Value], ...] = get_args(ModelInputChunk)
_CHUNKS: dict[str, Any] = {kind._defaults["type"]: kind for kind in _CHUNK_KINDS}


def _read_chunk(value: Any) -> ModelInputChunk:
    """A chunk, or the mapping of its fields. Clients before 0.18 send no "type": then the fields tell."""
    if isinstance(value, _CHUNK_KINDS):
        return value  # type: ignore[return-value]  # one of the arms
    if not isinstance(value, Mapping):
        raise Mismatch(f"expected a chunk, got {describe(value)}")
    kind = value.get("type")
    if kind is None:
        by_field = {"data": "image", "location": "image_asset_pointer", "dmel": "dmel", "tokens": "encoded_text"}
        kind = next((word for field, word in by_field.items() if field in value), None)
    if not isinstance(kind, str) or kind not in _CHUNKS:
        raise Mismatch(f"expected one of the chunk types {', '.join(_CHUNKS)}, got {describe(value)}")
    return _CHUNKS[kind]._coerce(value)  # type: ignore[no-any-return]


class ModelInput(Value):
    """A prompt: chunks in order. Immutable: `append` and `append_int` give a new one.

    >>> ModelInput.from_ints([1, 2]).append_int(3).to_ints()
    [1, 2, 3]
    """

    chunks: list[ModelInputChunk]
    _encoded: dict[str, Any] = field(init=False)

    if TYPE_CHECKING:

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
                read.append(_read_chunk(chunk))
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


class ProvenanceSpan(Value):
    """A run of tokens: positions [offset, offset + length) of what a sampling request was given or produced."""

    sequence_id: str
    offset: int = 0
    length: int

    def _check(self) -> None:
        name = type(self).__name__
        if not self.sequence_id:
            raise ValidationError(f"{name}.sequence_id is empty: pass the sequence_id of a SampledSequence")
        if self.offset < 0 or self.length < 0:
            raise ValidationError(f"{name} has offset {self.offset} and length {self.length}: neither may be negative")


class PromptProvenanceSpan(ProvenanceSpan):
    """A run of tokens that were the input of a sampling request: positions [offset, offset + length) of its prompt."""


class SampledProvenanceSpan(ProvenanceSpan):
    """A run of tokens that a sampled sequence produced: positions [offset, offset + length) of its tokens."""


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
        try:
            put(self, "model_input", ModelInput._coerce(model_input))
        except Mismatch as error:
            raise ValidationError(f"Datum.model_input: {error.reason}") from None
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
    if not isinstance(spans, (list, tuple)):
        raise ValidationError(f"Datum.{name}: expected a list of spans, got {describe(spans)}")
    for index, span in enumerate(spans):
        if not isinstance(span, ProvenanceSpan):
            raise ValidationError(
                f"Datum.{name}[{index}]: expected PromptProvenanceSpan or SampledProvenanceSpan, got {describe(span)}"
            )
    return list(spans)


def _check_tiling(field: str, spans: ProvenanceSpans, length: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise ValidationError(f"with_provenance: the spans cover {covered} positions, but {field} has {length}")
