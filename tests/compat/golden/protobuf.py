"""A small protobuf reader and writer for recording: it renders a request as readable JSON and builds answers.

It shares no code with the package on purpose, so that a mistake there cannot hide here.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from typing import Any

DTYPES = {0: "unspecified", 1: "float32", 2: "int64", 3: "int32", 4: "bfloat16"}
DTYPE_NUMBERS = {name: number for number, name in DTYPES.items()}

# Field number -> (name, kind). "[x]" repeats, "{x}" is a map from string to x, "array:f" is packed bytes.
SCHEMA: dict[str, dict[int, tuple[str, str]]] = {
    "ForwardBackwardRequest": {
        1: ("model_id", "string"),
        2: ("seq_id", "int"),
        3: ("data", "[Datum]"),
        4: ("loss_fn", "string"),
        5: ("loss_fn_config", "{double}"),
        6: ("forward_only", "bool"),
        7: ("loss_fn_config_v2", "{LossConfigValue}"),
    },
    "LossConfigValue": {1: ("number", "double"), 2: ("text", "string")},
    "Datum": {
        1: ("model_input", "[Chunk]"),
        2: ("loss_fn_inputs", "{Tensor}"),
        3: ("model_input_spans", "[ProvenanceSpan]"),
        4: ("loss_fn_input_spans", "[ProvenanceSpan]"),
    },
    "ProvenanceSpan": {1: ("prompt_tokens", "Span"), 2: ("sampled_tokens", "Span")},
    "Span": {1: ("sequence_id", "string"), 2: ("offset", "int"), 3: ("length", "int")},
    "Chunk": {1: ("encoded_text", "EncodedText"), 2: ("image", "Image"), 3: ("dmel", "Dmel")},
    "EncodedText": {1: ("tokens", "array:i")},
    "Image": {
        1: ("data", "base64"),
        2: ("format", "string"),
        3: ("expected_tokens", "int"),
        4: ("override_dimensions", "Dimensions"),
    },
    "Dimensions": {1: ("width", "int"), 2: ("height", "int")},
    "Dmel": {1: ("dmel", "base64")},
    "Tensor": {1: ("dense", "base64"), 2: ("sparse_csr", "Csr"), 3: ("dtype", "dtype"), 4: ("shape", "ints")},
    "Csr": {1: ("values", "base64"), 2: ("crow_indices", "array:q"), 3: ("col_indices", "array:q")},
}


def decode(message: str, data: bytes) -> dict[str, Any]:
    """The message as a JSON-like value; a field that the schema does not know is kept under its number."""
    out: dict[str, Any] = {}
    for number, _, raw in fields(data):
        name, kind = SCHEMA[message].get(number, (f"field_{number}", "base64"))
        if kind.startswith("["):
            out.setdefault(name, []).append(value_of(kind[1:-1], raw))
        elif kind.startswith("{"):
            entry = {inside: value for inside, _, value in fields(raw)}
            out.setdefault(name, {})[entry.get(1, b"").decode()] = value_of(kind[1:-1], entry.get(2, b""))
        elif kind == "ints":
            out.setdefault(name, []).extend(varints(raw) if isinstance(raw, bytes) else [raw])
        else:
            out[name] = value_of(kind, raw)
    for name, kind in SCHEMA[message].values():
        if kind.startswith("{") and name in out:
            out[name] = dict(sorted(out[name].items()))
    return with_numbers(out) if message == "Tensor" else out


def value_of(kind: str, raw: Any) -> Any:
    if kind in SCHEMA:
        return decode(kind, raw)
    if kind == "string":
        return raw.decode()
    if kind == "base64":
        return base64.b64encode(raw).decode() if isinstance(raw, bytes) else raw
    if kind == "bool":
        return bool(raw)
    if kind == "double":
        return struct.unpack("<d", raw)[0] if raw else 0.0
    if kind == "dtype":
        return DTYPES[raw]
    if kind.startswith("array:"):
        return unpack(kind[-1], raw)
    return raw


def with_numbers(tensor: dict[str, Any]) -> dict[str, Any]:
    """Show a tensor's values as numbers instead of base64."""
    code = {"float32": "f", "int64": "q", "int32": "i"}.get(tensor.get("dtype", ""))
    if code and "dense" in tensor:
        tensor["dense"] = unpack(code, base64.b64decode(tensor["dense"]))
    if code and "sparse_csr" in tensor:
        tensor["sparse_csr"]["values"] = unpack(code, base64.b64decode(tensor["sparse_csr"].get("values", "")))
    return tensor


def canonical(message: str, data: bytes) -> bytes:
    """The same bytes with map entries sorted by key: protobuf leaves their order open, and it differs between runs."""
    out: list[tuple[int, bytes, bytes]] = []
    for number, wire, raw in fields(data):
        kind = SCHEMA[message].get(number, ("", "base64"))[1]
        inner, key = kind.strip("[]{}"), b""
        if kind.startswith("{"):
            entry = {inside: (inside_wire, value) for inside, inside_wire, value in fields(raw)}
            key = entry[1][1]
            if inner in SCHEMA and 2 in entry:
                entry[2] = (2, canonical(inner, entry[2][1]))
            raw = b"".join(encoded(inside, *entry[inside]) for inside in sorted(entry))
        elif inner in SCHEMA:
            raw = canonical(inner, raw)
        out.append((number, key, encoded(number, wire, raw)))
    first = {number: index for index, (number, _, _) in reversed(list(enumerate(out)))}
    return b"".join(chunk for _, _, chunk in sorted(out, key=lambda entry: (first[entry[0]], entry[1])))


def encoded(number: int, wire: int, raw: Any) -> bytes:
    if wire == 0:
        return integer(number, raw)
    return field(number, raw) if wire == 2 else tag(number, wire) + raw


def fields(data: bytes) -> Iterable[tuple[int, int, Any]]:
    """Field number, wire type and payload: an int for a varint, bytes for everything else."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = read_varint(data, at)
            yield key >> 3, wire, value
            continue
        size, at = read_varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        yield key >> 3, wire, data[at : at + size]
        at += size


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7


def varints(data: bytes) -> list[int]:
    out, at = [], 0
    while at < len(data):
        value, at = read_varint(data, at)
        out.append(value)
    return out


def unpack(code: str, raw: bytes) -> list[Any]:
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def pack(code: str, values: Iterable[Any]) -> bytes:
    values = list(values)
    return struct.pack(f"<{len(values)}{code}", *values)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def field(number: int, payload: bytes | str) -> bytes:
    raw = payload.encode() if isinstance(payload, str) else payload
    return tag(number, 2) + varint(len(raw)) + raw


def integer(number: int, value: int) -> bytes:
    return tag(number, 0) + varint(value)


def tensor(dtype: str, shape: list[int], dense: bytes) -> bytes:
    return field(1, dense) + integer(3, DTYPE_NUMBERS[dtype]) + field(4, b"".join(map(varint, shape)))


def sampled_sequence(
    stop_reason: int, tokens: list[int], logprobs: list[float] | None, topk: bytes | None = None
) -> bytes:
    """Stop reason 0 means `stop`, 1 means `length`."""
    out = integer(1, stop_reason) + field(2, pack("i", tokens))
    out += b"" if logprobs is None else field(3, pack("f", logprobs))
    return out + (b"" if topk is None else field(4, topk))


def topk_logprobs(rows: list[list[tuple[int, float]]]) -> bytes:
    flat = [pair for row in rows for pair in row]
    out = field(1, pack("i", [token for token, _ in flat])) + field(2, pack("f", [logprob for _, logprob in flat]))
    return out + integer(3, len(rows[0])) + integer(4, len(rows))


def batched_tensor(dtype: str, rows: list[bytes], trailing_shape: list[int]) -> bytes:
    """`rows` holds one datum's bytes each; offsets are counted in bytes."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    out = field(1, b"".join(rows)) + field(2, pack("q", offsets)) + integer(3, DTYPE_NUMBERS[dtype])
    return out + (field(4, b"".join(map(varint, trailing_shape))) if trailing_shape else b"")


def forward_backward_output(records: list[bytes], metrics: dict[str, float], output_type: str = "ArrayRecord") -> bytes:
    out = field(1, output_type) + b"".join(field(2, record) for record in records)
    for name, number in metrics.items():
        out += field(3, field(1, name) + tag(2, 1) + struct.pack("<d", number))
    return out


def array_record(tensors: dict[str, bytes], num_datums: int) -> bytes:
    out = b"".join(field(2, field(1, name) + field(2, raw)) for name, raw in tensors.items())
    return out + integer(3, num_datums)
