"""Converts values to JSON bytes and back, per dialect. Knows no endpoints; their bodies are in `requests`."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

import orjson

from tinkex.errors import APIResponseValidationError, ValidationError
from tinkex.types.base import Value
from tinkex.types.coerce import is_lenient
from tinkex.wire.dialect import Dialect

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
            return json.loads(content)
        raise


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


def decode_answer(content: bytes) -> Any:
    """`decode`, for what a service answered: content that is no JSON is an APIResponseValidationError."""
    try:
        return decode(content)
    except ValueError:
        shown = content[:200].decode("utf-8", "replace")
        raise APIResponseValidationError(
            body=shown, message=f"The service answered {len(content)} bytes that are not JSON: {shown!r}"
        ) from None
