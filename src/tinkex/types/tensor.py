"""`TensorData`: numbers on their way to or from the service, as one packed buffer.

The wire knows two dtypes. Every float type becomes float32 (float64 is rounded to 24 bits of precision, float16 and
bfloat16 are exact); every int, unsigned and bool type becomes int64. What cannot be kept is rejected: complex numbers,
text, objects, 1.5 as int64, a uint64 from 2^63 on, 1e39 as float32. numpy and torch are touched only if the caller did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tinkex.errors import MissingExtra, ValidationError
from tinkex.types.base import ABSENT, LazyValue, field
from tinkex.types.coerce import Mismatch, coercer, describe, fits_index
from tinkex.types.packed import WIDTHS, Buffer, Code, array_over, numpy_for, pack, unpack
from tinkex.types.packed import TensorDtype as TensorDtype

if TYPE_CHECKING:
    import numpy as np
    import torch

_CODES: dict[TensorDtype, Code] = {"int64": "q", "float32": "f"}


class TensorData(LazyValue, kw_only=False):
    """A dense tensor, or a sparse one in CSR form (then `data` holds the stored values only and `shape` is given).

    >>> TensorData([[1, 2], [3, 4]]).shape
    [2, 2]
    """

    data: list[int] | list[float]
    dtype: TensorDtype
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None
    buffer: Buffer = field(init=False)
    _makers: ClassVar = {"data": lambda self: unpack(_CODES[self.dtype], self.buffer)}

    def __init__(
        self,
        data: Any = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = ABSENT,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        try:
            packed = pack(data if data is not None else [], dtype)
        except Mismatch as error:
            raise ValidationError(f"TensorData.data{error.place}: {error.reason}") from None
        passed_none = shape is None
        if shape in (None, ABSENT):
            shape = None if len(packed.shape) == 1 else packed.shape
        crow, col = _whole("sparse_crow_indices", sparse_crow_indices), _whole("sparse_col_indices", sparse_col_indices)
        self._set(packed.buffer, packed.dtype, _whole("shape", shape), crow, col)
        if passed_none:
            object.__setattr__(self, "_given", self._given | {"shape"})

    def _set(
        self,
        buffer: Buffer,
        dtype: TensorDtype,
        shape: Sequence[int] | None,
        crow: Sequence[int] | None,
        col: Sequence[int] | None,
    ) -> None:
        put = object.__setattr__
        put(self, "buffer", buffer)
        put(self, "dtype", dtype)
        put(self, "shape", None if shape is None else [int(extent) for extent in shape])
        put(self, "sparse_crow_indices", None if crow is None else list(crow))
        put(self, "sparse_col_indices", None if col is None else list(col))
        if crow is None and col is None:
            put(self, "_given", _FLAT if shape is None else _SHAPED)
            if shape is not None and _product(self.shape or ()) != len(self):
                raise ValidationError(f"TensorData: shape {self.shape} does not hold {len(self)} values")
            if not len(buffer) and max(self.shape or (0,)) > _MAX_EMPTY:  # as nested lists it would fill the memory
                raise ValidationError(f"TensorData: shape {self.shape} is too large for a tensor without values")
        else:
            put(self, "_given", frozenset(self._defaults))
            _check_csr(self)

    @classmethod
    def from_buffer(
        cls,
        buffer: Buffer,
        dtype: TensorDtype,
        shape: Sequence[int] | None = None,
        crow: Sequence[int] | None = None,
        col: Sequence[int] | None = None,
    ) -> Self:
        """A tensor over packed little-endian numbers, which are not copied: do not change them afterwards."""
        if len(buffer) % WIDTHS[_CODES[dtype]]:
            raise ValidationError(f"TensorData: {len(buffer)} bytes are not a whole number of {dtype} values")
        self = cls.__new__(cls)
        self._set(buffer, dtype, shape, crow, col)
        return self

    @classmethod
    def from_list(cls, values: Any, key: str | None = None) -> Self:
        """Numbers, nested lists of them (rectangular), an array or a tensor; `key` names a loss input."""
        try:
            packed = pack(values, INPUT_DTYPES.get(key or ""))
        except Mismatch as error:
            name = "TensorData" if key is None else f"loss_fn_inputs[{key!r}]"
            raise ValidationError(f"{name}{error.place}: {error.reason}") from None
        return cls.from_buffer(packed.buffer, packed.dtype, packed.shape)

    @classmethod
    def from_numpy(cls, array: np.ndarray[Any, Any]) -> Self:
        return cls.from_list(array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """A copy of the tensor's numbers, from any device, detached from its graph."""
        return cls.from_list(tensor)

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0, *, key: str | None = None) -> Self:
        """A 2-D tensor without the entries that equal `pad_value`, if that is smaller; otherwise as `from_torch`."""
        dense = cls.from_list(tensor, key)
        return _without_padding(dense, _whole_pad(pad_value)) if len(dense.shape or ()) == 2 else dense

    @property
    def is_sparse(self) -> bool:
        return self.sparse_crow_indices is not None

    @property
    def size(self) -> int:
        """How many numbers the dense tensor has."""
        return len(self) if self.shape is None else _product(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the packed numbers in bytes, without the indices of a sparse tensor."""
        return len(self.buffer)

    def to_numpy(self, pad_value: int = 0) -> np.ndarray[Any, Any]:
        """A new array; entries that a sparse tensor does not store are `pad_value`."""
        values = array_over(self.buffer, "<f4" if self.dtype == "float32" else "<i8", "TensorData.to_numpy()")
        if self.sparse_crow_indices is None or self.shape is None:
            return values.astype(self.dtype).reshape(self.shape if self.shape is not None else -1)
        import numpy as np

        dense = np.full(self.shape, _whole_pad(pad_value), dtype=self.dtype)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.sparse_crow_indices))
        dense[rows, self.sparse_col_indices] = values
        return dense

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        """A new tensor; entries that a sparse tensor does not store are `pad_value`."""
        try:
            import torch
        except ImportError:
            raise MissingExtra("TensorData.to_torch()", "torch") from None
        return torch.from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: int = 0) -> Any:
        """The numbers, nested as `shape` says; without a shape the tensor is one-dimensional."""
        if self.sparse_crow_indices is None:
            return list(self.data) if self.shape is None else _nest(self.data, self.shape)
        assert self.sparse_col_indices is not None and self.shape is not None
        pad = _whole_pad(pad_value) if self.dtype == "int64" else float(_whole_pad(pad_value))
        rows = [[pad] * self.shape[1] for _ in range(self.shape[0])]
        bounds = self.sparse_crow_indices
        for row, start, stop in zip(rows, bounds, bounds[1:], strict=False):
            for position in range(start, stop):
                row[self.sparse_col_indices[position]] = self.data[position]
        return rows

    def __len__(self) -> int:
        """How many numbers are stored."""
        return len(self.buffer) // WIDTHS[_CODES[self.dtype]]

    def __bool__(self) -> bool:
        return True  # `if datum.loss_fn_inputs.get("weights")` asks whether there is a tensor, not whether it is empty

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((self.dtype, bytes(self.buffer)))

    def _identity(self) -> tuple[Any, ...]:
        return self.dtype, self._extents(), self.sparse_crow_indices, self.sparse_col_indices, self.buffer

    def _extents(self) -> list[int]:
        return self.shape if self.shape is not None else [len(self)]

    def __repr__(self) -> str:
        sparse = f", {len(self)} stored (CSR)" if self.is_sparse else ""
        return f"TensorData({self.dtype}, shape={self._extents()}{sparse})"

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.dtype, self.shape, self.sparse_crow_indices, self.sparse_col_indices)
        return type(self).from_buffer, (bytes(self.buffer), *parts)


_LIST_OF_INTS = coercer(list[int])


def _whole(name: str, values: Any) -> list[int] | None:
    """Return extents or indices, which may come from any client: whole numbers that fit 64 bits."""
    try:
        numbers: list[int] | None = None if values is None else _LIST_OF_INTS(values)
    except Mismatch as error:
        raise ValidationError(f"TensorData.{name}{error.place}: {error.reason}") from None
    if numbers and not -(2**63) <= min(numbers) <= max(numbers) < 2**63:
        raise ValidationError(f"TensorData.{name}: a number does not fit 64 bits")
    return numbers


_MAX_EMPTY = 1 << 24
_FLAT = frozenset(("data", "dtype"))
_SHAPED = frozenset(("data", "dtype", "shape"))

INPUT_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""The inputs of the known losses and their dtypes; the values decide that of any other input. `rules.losses` says which
loss takes which."""


def _without_padding(dense: TensorData, pad_value: int) -> Any:
    np = numpy_for("TensorData.from_torch_sparse()")
    assert dense.shape is not None
    array = dense.to_numpy()
    stored = array != pad_value
    count = int(stored.sum())
    # Row bounds, and a column for each stored value: the sparse form must be smaller to be worth it.
    if dense.shape[0] + 1 + 2 * count >= dense.size:
        return dense
    crow = [0, *np.cumsum(stored.sum(axis=1)).tolist()]
    col = np.nonzero(stored)[1].tolist()
    values = array[stored].astype("<f4" if dense.dtype == "float32" else "<i8")
    return type(dense).from_buffer(values.tobytes(), dense.dtype, dense.shape, crow, col)


def _check_csr(tensor: TensorData) -> None:
    shape, crow, col = tensor.shape, tensor.sparse_crow_indices, tensor.sparse_col_indices
    if shape is None or len(shape) != 2 or crow is None or col is None:
        raise ValidationError(
            "TensorData: a sparse tensor needs sparse_crow_indices, sparse_col_indices and a shape of two extents"
        )
    if len(crow) != shape[0] + 1 or crow[0] != 0 or crow[-1] != len(col) or sorted(crow) != crow:
        raise ValidationError(
            f"TensorData: sparse_crow_indices must rise from 0 to {len(col)} in {shape[0] + 1} steps for shape {shape}"
        )
    if len(col) != len(tensor):
        raise ValidationError(f"TensorData: {len(tensor)} stored values need as many column indices, got {len(col)}")
    if col and not 0 <= min(col) <= max(col) < shape[1]:
        raise ValidationError(f"TensorData: column indices must be between 0 and {shape[1] - 1} for shape {shape}")


def _nest(values: Sequence[Any], shape: Sequence[int]) -> Any:
    if not shape:
        return values[0]
    if len(shape) == 1:
        return list(values)
    step = _product(shape[1:])
    return [_nest(values[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]


def _product(shape: Sequence[int]) -> int:
    total = 1
    for extent in shape:
        if extent < 0:
            raise ValidationError(f"TensorData: shape {list(shape)} has a negative extent")
        total *= extent
    return total


def _whole_pad(pad_value: Any) -> int:
    if isinstance(pad_value, bool) or not fits_index(pad_value):
        raise ValidationError(f"pad_value must be an int, got {describe(pad_value)}")
    return int(pad_value)
