"""Converts values to JSON bytes and back, per dialect. Knows no endpoints; their bodies are in `requests`."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

import orjson

from tinkex.errors import APIResponseValidationError, ValidationError
from tinkex.types.base import Value
from tinkex.types.coerce import is_lenient
from tinkex.wire import scan
from tinkex.wire.dialect import Dialect

MAX_DEPTH = 100
"""Of lists and objects in a response. Python's own recursion ends at 1,000, and every value is at most ten deep."""
SMALL_BYTES = 1 << 20
"""Up to here it does not matter what a response becomes in memory."""
MAX_JSON_BYTES = 1 << 29
"""Of a response: decoding needs several times as much."""
MAX_ELEMENTS = 1 << 27
"""Of a response, as `scan` counts them. A million tokens with their twenty likeliest have 82 million; whether
their digits fit is for MAX_JSON_BYTES to say. Empty lists, the worst, reach it with 134 MB and take 4 GB to decode."""

V = TypeVar("V", bound=Value)


def encode(obj: Any, *, is_finite: bool = False) -> bytes:
    """Compact JSON. NaN and infinities are rejected by name: JSON has no word for them.

    `is_finite` says that the caller has looked already: searching a long body costs more than writing it.
    """
    try:
        content = orjson.dumps(obj)
    except TypeError as error:
        raise ValidationError(f"This cannot be sent as JSON: {error}.") from None
    # orjson writes a NaN as null, silently; only a body with a null in it can hide one.
    if not is_finite and b"null" in content:
        reject_non_finite(obj)
    return content


def reject_non_finite(obj: Any, where: str = "") -> None:
    """Raise ValidationError that names where the first NaN or infinity is."""
    if isinstance(obj, float):
        if not math.isfinite(obj):
            raise ValidationError(f"{where.removeprefix('.') or 'The value'} is {obj}, which JSON cannot carry.")
    elif isinstance(obj, dict):
        for name, entry in obj.items():
            reject_non_finite(entry, f"{where}.{name}")
    elif isinstance(obj, (list, tuple)):
        for index, entry in enumerate(obj):
            reject_non_finite(entry, f"{where}[{index}]")


def decode(content: bytes) -> Any:
    """Read JSON; the literals NaN and Infinity, which some services write, are understood. Raises ValueError."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        if b"NaN" in content or b"Infinity" in content:
            return _decode_with_nan(content)
        raise


def _decode_with_nan(content: bytes) -> Any:
    try:
        obj = json.loads(content)
        if b"\\ud" in content.lower():  # half a character, which orjson rejects too: nothing could be sent with it
            json.dumps(obj, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("the JSON is nested too deep") from None
    return obj


def decode_bounded(content: bytes) -> Any:
    """`decode`, for bytes that somebody else made: JSON too deep or with too many elements is a ValueError too."""
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"the JSON has more than {MAX_JSON_BYTES:,} bytes")
    if len(content) > SMALL_BYTES and scan.count_json_elements(content) > MAX_ELEMENTS:
        raise ValueError(f"the JSON has more than {MAX_ELEMENTS:,} elements")
    obj = decode(content)
    if scan.is_json_deeper_than(content, MAX_DEPTH):
        raise ValueError(f"the JSON is nested deeper than {MAX_DEPTH} levels")
    return obj


def dump(value: Value, dialect: Dialect) -> dict[str, Any]:
    """The fields of a value that travel in this dialect, in the order of declaration."""
    if dialect is Dialect.JSON:
        return value.model_dump(mode="json", exclude_unset=True)
    return value.model_dump(mode="json", exclude_none=True)


def read(cls: type[V], obj: Any) -> V:
    """A value from decoded JSON; a response that does not fit is an APIResponseValidationError that says why."""
    try:
        return cls.model_validate(obj)
    except ValidationError:
        pass
    token = is_lenient.set(True)
    try:
        return cls.model_validate(obj)
    except ValidationError as error:
        raise APIResponseValidationError(body=obj, message=f"The service's answer does not fit: {error}") from None
    finally:
        is_lenient.reset(token)


def read_content(cls: type[V], content: bytes) -> V:
    """`read`, from the bytes of a response."""
    return read(cls, decode_answer(content))


def read_object(content: bytes) -> dict[str, Any]:
    """Return what a service answered, if it is a JSON object; anything else is an APIResponseValidationError."""
    obj = decode_answer(content)
    if not isinstance(obj, dict):
        raise APIResponseValidationError(body=obj, message=f"The service answered a bare {type(obj).__name__}")
    return obj


def decode_answer(content: bytes) -> Any:
    """`decode`, for what a service answered: content that is no JSON is an APIResponseValidationError."""
    try:
        return decode_bounded(content)
    except ValueError as error:
        shown = content[:200].decode("utf-8", "replace")
        is_json = str(error).startswith("the JSON")
        reason = f"cannot be taken, because {error}" if is_json else "are not JSON"
        raise APIResponseValidationError(
            body=shown, message=f"The service answered {len(content)} bytes that {reason}: {shown!r}"
        ) from None
