"""Writes and reads the `Tensor` message, and widens the four dtypes of the wire to the two of values."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal

from google.protobuf.message import DecodeError

from tinkex.errors import ValidationError
from tinkex.types.tensor import TensorData
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.proto_writer import Parts, blob, fields_of, integer, message, packed

_TENSOR, _CSR = fields_of(pb.Tensor), fields_of(pb.SparseCsr)
DTYPE_NUMBERS = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}
_DTYPES: dict[int, Literal["int64", "float32"]] = {
    pb.DTYPE_FLOAT32: "float32",
    pb.DTYPE_INT64: "int64",
    pb.DTYPE_INT32: "int64",
    pb.DTYPE_BFLOAT16: "float32",
}


def parse(kind: Any, content: bytes) -> Any:
    """A message of the generated class, or a ValidationError."""
    try:
        return kind.FromString(content)
    except (DecodeError, UnicodeDecodeError) as error:  # the latter from the pure-Python runtime
        raise ValidationError(f"{len(content)} bytes are not a {kind.DESCRIPTOR.name}: {error}") from None


def write_tensor(tensor: TensorData) -> Parts:
    if tensor.sparse_crow_indices is None:
        parts = blob(_TENSOR.dense, tensor.buffer, keep_default=True)
    else:
        crow, col = pack_indices(tensor.sparse_crow_indices), pack_indices(tensor.sparse_col_indices or [])
        values = blob(_CSR.values, tensor.buffer)
        parts = message(_TENSOR.sparse_csr, [*values, *blob(_CSR.crow_indices, crow), *blob(_CSR.col_indices, col)])
    return [*parts, integer(_TENSOR.dtype, DTYPE_NUMBERS[tensor.dtype]), packed(_TENSOR.shape, tensor.shape or ())]


def read_tensor(tensor: Any) -> TensorData:
    """A tensor over the bytes that protobuf hands out; without a shape it is one-dimensional."""
    shape = tuple(tensor.shape) or None
    dtype = dtype_of(tensor.dtype)
    if not tensor.HasField("sparse_csr"):
        return TensorData.from_buffer(widened(tensor.dense, tensor.dtype), dtype, shape)
    csr = tensor.sparse_csr
    crow, col = unpack_indices(csr.crow_indices), unpack_indices(csr.col_indices)
    return TensorData.from_buffer(widened(csr.values, tensor.dtype), dtype, shape, crow, col)


def dtype_of(wire_dtype: int) -> Literal["int64", "float32"]:
    """The dtype that a value has for one on the wire."""
    try:
        return _DTYPES[wire_dtype]
    except KeyError:
        raise ValidationError(f"a tensor has the unknown dtype {wire_dtype}") from None


def widened(buffer: bytes, wire_dtype: int) -> bytes:
    """The two narrow dtypes become int64 and float32; the others pass untouched."""
    if wire_dtype == pb.DTYPE_INT32:
        count = count_of(buffer, 4)
        return struct.pack(f"<{count}q", *struct.unpack(f"<{count}i", buffer))
    if wire_dtype == pb.DTYPE_BFLOAT16:  # the upper half of a float32
        out = bytearray(4 * count_of(buffer, 2))
        out[2::4], out[3::4] = buffer[0::2], buffer[1::2]
        return bytes(out)
    return buffer


def pack_indices(indices: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(indices)}q", *indices)


def unpack_indices(buffer: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{count_of(buffer, 8)}q", buffer)


def count_of(buffer: bytes, width: int) -> int:
    """How many values of this width there are; ValidationError if the last one is cut."""
    count, rest = divmod(len(buffer), width)
    if rest:
        raise ValidationError(f"{len(buffer)} bytes are not a whole number of {width}-byte values")
    return count
