"""Packs runs of numbers (lists, arrays, tensors) as little-endian bytes, and unpacks them.

A struct packs a list at C speed and rejects what does not fit; only then is the culprit looked for and named.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tinkex.errors import MissingExtra
from tinkex.types.coerce import Mismatch, describe, entries, fits_index
from tinkex.types.number_pieces import PIECE_NUMBERS, pieces_of

if TYPE_CHECKING:
    import numpy as np

Buffer = bytes | memoryview
Code = Literal["i", "q", "f"]
TensorDtype = Literal["int64", "float32"]

WIDTHS: dict[Code, int] = {"i": 4, "q": 8, "f": 4}
_LITTLE = sys.byteorder == "little"


def pack_tokens(values: Sequence[Any]) -> bytes:
    """Token ids as int32. Floats, bools, negative numbers and those from 2^31 on are rejected."""
    pieces = []
    for piece in pieces_of(values):
        try:
            packed = struct.pack(f"<{len(piece)}i", *piece)
        except (struct.error, TypeError):
            raise _bad_token(values) from None
        if has_negative(packed, 4) or has_bool(piece, packed):
            raise _bad_token(values)
        pieces.append(packed)
    return _joined(pieces)


def _bad_token(values: Sequence[Any]) -> Mismatch:
    for index, value in enumerate(values):
        if isinstance(value, bool) or not fits_index(value):
            return Mismatch(f"expected a token id (an int), got {describe(value)}", f"[{index}]")
        if not 0 <= int(value) < 2**31:
            return Mismatch(f"a token id is between 0 and 2^31 - 1, got {int(value)}", f"[{index}]")
    return Mismatch(f"expected a list of token ids, got {describe(values)}")


def pack_ints(values: Sequence[Any]) -> bytes:
    """Int64. Bools count as 0 and 1, and 3.0 as 3; 1.5 is rejected, and so is what does not fit 64 bits."""
    pieces, start = [], 0
    for piece in pieces_of(values):
        try:
            packed = struct.pack(f"<{len(piece)}q", *piece)
        except (struct.error, TypeError):
            packed = struct.pack(f"<{len(piece)}q", *(_whole(index, value) for index, value in enumerate(piece, start)))
        pieces.append(packed)
        start += len(piece)
    return _joined(pieces)


def _whole(index: int, value: Any) -> int:
    if isinstance(value, float) or (hasattr(value, "is_integer") and hasattr(value, "__float__")):
        if not value.is_integer():
            raise Mismatch(f"expected a whole number for int64, got {describe(value)}", f"[{index}]")
    elif not fits_index(value):
        raise Mismatch(f"expected a whole number for int64, got {describe(value)}", f"[{index}]")
    if not -(2**63) <= int(value) < 2**63:
        raise Mismatch(f"{int(value)} does not fit int64", f"[{index}]")
    return int(value)


def pack_floats(values: Sequence[Any]) -> bytes:
    """Float32: each number is rounded to the nearest one (24 bits of precision). NaN and infinity pass."""
    try:
        return _joined([struct.pack(f"<{len(piece)}f", *piece) for piece in pieces_of(values)])
    except (struct.error, TypeError, OverflowError, ValueError):
        raise _bad_float(values) from None


def _joined(pieces: list[bytes]) -> bytes:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def widen_ints(packed: Buffer) -> bytes:
    """Int32 as int64, without a list of all the numbers."""
    step = PIECE_NUMBERS * WIDTHS["i"]
    return _joined([pack_ints(unpack("i", packed[at : at + step])) for at in range(0, len(packed), step)])


def _bad_float(values: Sequence[Any]) -> Mismatch:
    for index, value in enumerate(values):
        try:
            struct.pack("<f", value)
        except OverflowError:
            return Mismatch(f"{describe(value)} is beyond the range of float32", f"[{index}]")
        except (struct.error, TypeError, ValueError):
            return Mismatch(f"expected a number, got {describe(value)}", f"[{index}]")
    return Mismatch(f"expected a list of numbers, got {describe(values)}")


def unpack(code: Code, buffer: Buffer) -> list[Any]:
    """The numbers of a packed run, as a list."""
    if _LITTLE:
        return memoryview(buffer).cast("B").cast(code).tolist()
    return list(struct.unpack(f"<{len(buffer) // WIDTHS[code]}{code}", buffer))


class Packed(NamedTuple):
    buffer: bytes
    dtype: TensorDtype
    shape: list[int]


def pack(values: Any, dtype: TensorDtype | None) -> Packed:
    """Numbers of any origin as a packed copy; without a dtype, the values decide."""
    if dtype is not None and dtype not in ("int64", "float32"):
        raise Mismatch(f"dtype is 'int64' or 'float32', not {dtype!r}")
    if is_torch(values):
        return _pack_array(_array_of_torch(values), dtype)
    if hasattr(values, "__array__"):
        return _pack_array(numpy_for("A numpy array").asarray(values), dtype)
    flat, shape = _flatten(entries(values, "a list of numbers"))
    if dtype is not None:
        return Packed(pack_ints(flat) if dtype == "int64" else pack_floats(flat), dtype, shape)
    # Whole numbers stay whole; one float makes all of them floats; nothing at all is float32.
    if flat and all(hasattr(kind, "__index__") for kind in set(map(type, flat))):
        return Packed(pack_ints(flat), "int64", shape)
    return Packed(pack_floats(flat), "float32", shape)


def _flatten(values: Sequence[Any]) -> tuple[Sequence[Any], list[int]]:
    """The numbers in row-major order and the shape; ragged rows are rejected."""
    if not len(values) or not _is_row(values[0]):
        return values, [len(values)]
    flat: list[Any] = []
    inner: list[int] = []
    for index, row in enumerate(values):
        if not _is_row(row):
            raise Mismatch(f"expected a row like those before (shape {inner}), got {describe(row)}", f"[{index}]")
        numbers, shape = _flatten(entries(row, "a list of numbers"))
        if index and shape != inner:
            raise Mismatch(
                f"ragged: this row has shape {shape}, the rows before have {inner}. Pad them to one length, or pass "
                "one Datum per row.",
                f"[{index}]",
            )
        inner = shape
        flat.extend(numbers)
    return flat, [len(values), *inner]


def _is_row(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0


def is_torch(value: Any) -> bool:
    """Return whether this is a torch tensor; False if torch was never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _array_of_torch(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64, torch.float16):
        tensor = tensor.float()  # numpy knows neither bfloat16 nor the 8-bit floats
    return tensor.cpu().numpy()


def _pack_array(array: Any, dtype: TensorDtype | None) -> Packed:
    np = numpy_for("A numpy array")
    kind = array.dtype.kind
    if kind == "V" and "float" in array.dtype.name:  # bfloat16 and the 8-bit floats of ml_dtypes
        array, kind = array.astype(np.float32), "f"
    if kind not in "fiub":
        raise Mismatch(f"numbers of dtype {array.dtype} cannot be sent; use a float, int or bool dtype")
    dtype = dtype or ("float32" if kind == "f" else "int64")
    shape = list(array.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype("<f4" if dtype == "float32" else "<i8")
    if dtype == "float32" and array.dtype.itemsize > 4 and kind == "f":
        _reject_where(np, array, np.isinf(cast) & ~np.isinf(array), "is beyond the range of float32")
    if dtype == "int64" and kind == "f":
        _reject_where(np, array, cast != array, "is not a whole number, as int64 needs")
    if dtype == "int64" and kind == "u" and array.dtype.itemsize == 8:
        _reject_where(np, array, cast < 0, "does not fit int64")
    return Packed(cast.tobytes(), dtype, shape)


def _reject_where(np: Any, array: Any, wrong: Any, reason: str) -> None:
    if wrong.any():
        position = np.unravel_index(int(wrong.argmax()), array.shape)
        raise Mismatch(f"{array[position]} {reason}", "".join(f"[{index}]" for index in position))


def numpy_for(what: str) -> Any:
    """numpy, or an error that names what needs it."""
    try:
        import numpy
    except ImportError:
        raise MissingExtra(what, "torch") from None
    return numpy


def array_over(buffer: Buffer, dtype: str, what: str) -> np.ndarray[Any, Any]:
    """A read-only array over packed numbers."""
    array: np.ndarray[Any, Any] = numpy_for(what).frombuffer(buffer, dtype=dtype)
    return array


# -- byte tricks for the hot path of every training call --------------------------------------------------------------
# All of them look at one byte of every packed little-endian number instead of making Python numbers: a call carries
# hundreds of thousands of them. Measured on 2,048 numbers.


def has_negative(packed: bytes, width: int) -> bool:
    """Return whether one of the packed integers of `width` bytes is negative.

    The sign is the top bit of an integer's last byte, and a byte with its top bit set is not ASCII. Asking `isascii` is
    30 times faster than reading the numbers.
    """
    return not packed[width - 1 :: width].isascii()


def has_bool(values: Sequence[Any], packed: bytes) -> bool:
    """Return whether one of the values, packed as int32, is a bool.

    A bool packs as 0 or 1. Asking only the entries whose first byte is 0 or 1 for their type is 5 times faster than
    asking each, as long as they are few.
    """
    suspects = packed[0::4].translate(_IS_0_OR_1)
    if suspects.count(1) > len(values) // 16:
        return bool in set(map(type, values))
    position = suspects.find(1)
    while position >= 0:
        if type(values[position]) is bool:
            return True
        position = suspects.find(1, position + 1)
    return False


_IS_0_OR_1 = bytes((1, 1, *bytes(254)))


def first_not_finite(packed: bytes) -> int | None:
    """Return the index of the first NaN or infinity among packed float32 numbers, or None.

    NaN, infinity and numbers beyond 1e38 end in 0x7f or 0xff (sign and top of the exponent): looking for those bytes
    takes 1.5 µs for 2,048 numbers, where adding the numbers up takes 20.
    """
    top = packed[3::4]
    if 0x7F not in top and 0xFF not in top:
        return None
    numbers = struct.iter_unpack("<f", packed)
    return next((index for index, (number,) in enumerate(numbers) if not math.isfinite(number)), None)
