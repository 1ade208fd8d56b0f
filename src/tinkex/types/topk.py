"""The likeliest tokens at each position, as two packed matrices or as lists of pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from tinkex.errors import ValidationError
from tinkex.types.base import Value, field
from tinkex.types.packed import Buffer, array_over, pack_floats, pack_tokens, unpack
from tinkex.types.tensor import TensorData

if TYPE_CHECKING:
    import numpy as np

TopkList = list[list[tuple[int, float]] | None]


class TopkLogprobs(Value, kw_only=False):
    """The k likeliest tokens at each position: two matrices of `length` rows and k columns.

    A row with fewer than k entries ends in fillers (token 0, log-probability -99999).
    """

    length: int
    k: int
    __slots__ = ("_logprobs", "_token_ids")
    FILLER = -99999.0

    if TYPE_CHECKING:
        _token_ids: Buffer = field(init=False)
        _logprobs: Buffer = field(init=False)

    def __init__(self, token_ids: Any, logprobs: Any) -> None:
        """Two matrices (arrays or nested lists) of one shape."""
        ids, values = TensorData(token_ids, "int64"), TensorData(logprobs, "float32")
        length, k = ids.shape if ids.shape is not None and len(ids.shape) == 2 else (len(ids), 0)
        self._set(pack_tokens(ids.data), values.buffer, length, k)

    def _set(self, token_ids: Buffer, logprobs: Buffer, length: int, k: int) -> None:
        if not len(token_ids) == len(logprobs) == 4 * length * k:
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
