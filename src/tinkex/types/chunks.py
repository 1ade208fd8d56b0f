"""Chunks: what a `ModelInput` is made of. Text as token ids, images, pointers to images, audio.

Token ids keep one packed form (int32); the list of them is made on first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from tinkex.errors import ValidationError
from tinkex.types.base import Value, field
from tinkex.types.coerce import Mismatch, describe
from tinkex.types.packed import Buffer, entries, pack_tokens, unpack


class EncodedTextChunk(Value):
    """A run of token ids.

    >>> EncodedTextChunk(tokens=[3, 1, 4]).length
    3
    """

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"
    __slots__ = ("_packed",)

    if TYPE_CHECKING:
        _packed: Buffer = field(init=False)

        def __init__(self, *, tokens: Iterable[int], type: Literal["encoded_text"] = "encoded_text") -> None: ...

    else:

        def __getattr__(self, name: str) -> Any:
            # Reached when a slot is empty: the list of tokens is made on first use, then kept.
            if name != "tokens":
                raise AttributeError(f"EncodedTextChunk has no attribute {name!r}")
            tokens = unpack("i", self._packed)
            object.__setattr__(self, "tokens", tokens)
            return tokens

    def _fill(self, given: Mapping[str, Any]) -> None:
        if given.keys() == _TOKENS:
            self._set(given["tokens"])
        else:
            super()._fill(given)  # rejects a wrong name or type
            self._set(given["tokens"])
            object.__setattr__(self, "_given", frozenset(given))

    def _set(self, tokens: Any) -> None:
        try:
            packed = pack_tokens(entries(tokens))
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
        return _room(self)


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
        return _room(self)


def _room(image: ImageChunk | ImageAssetPointerChunk) -> int:
    room = image.expected_tokens if image.expected_tokens is not None else image.tokens
    if room is None:
        raise ValidationError(f"The length of this {type(image).__name__} is unknown: pass expected_tokens=...")
    return room


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

_CHUNKS: dict[str, type[EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk]] = {
    "encoded_text": EncodedTextChunk,
    "image_asset_pointer": ImageAssetPointerChunk,
    "image": ImageChunk,
    "dmel": DmelChunk,
}


def read_chunk(value: Any) -> ModelInputChunk:
    """A chunk, or the mapping of its fields. Clients before 0.18 send no "type": then the fields tell."""
    if isinstance(value, (EncodedTextChunk, ImageChunk, ImageAssetPointerChunk, DmelChunk)):
        return value
    if not isinstance(value, Mapping):
        raise Mismatch(f"expected a chunk, got {describe(value)}")
    kind = value.get("type")
    if kind is None:
        by_field = {"data": "image", "location": "image_asset_pointer", "dmel": "dmel", "tokens": "encoded_text"}
        kind = next((word for field, word in by_field.items() if field in value), None)
    if not isinstance(kind, str) or kind not in _CHUNKS:
        raise Mismatch(f"expected one of the chunk types {', '.join(_CHUNKS)}, got {describe(value)}")
    return _CHUNKS[kind]._coerce(value)
