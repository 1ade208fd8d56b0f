"""Converts what a caller or a service passed into the annotated type of a field, or says what is wrong with it.

Annotations are compiled once per class into small functions. Lenient where it is safe (numpy scalars, tuples for
lists, ISO dates); strict where leniency hides mistakes (no bool for int, no text for numbers, no 1.5 for int).
"""

from __future__ import annotations

import base64
import contextvars
import datetime as dt
import enum
import operator
import re
import types as pytypes
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinkex.types.number_pieces import NumberPieces

Coercer = Callable[[Any], Any]


is_lenient: contextvars.ContextVar[bool] = contextvars.ContextVar("is_lenient", default=False)
"""Set while a response is read that did not fit strictly: services may write numbers and booleans as text."""


class Mismatch(Exception):
    """A value does not fit its annotation; carries the place inside the value and the reason."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place

    def inside(self, step: str) -> Mismatch:
        return Mismatch(self.reason, f"{step}{self.place}")


def coercer(hint: Any) -> Coercer:
    """The function that brings a value to `hint`."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return _literal(typing.get_args(hint))
    if origin in (typing.Union, pytypes.UnionType):
        return _union(typing.get_args(hint))
    if origin in (list, Sequence):
        return _list(coercer(typing.get_args(hint)[0]))
    if origin in (dict, Mapping):
        return _mapping(*(coercer(arg) for arg in typing.get_args(hint)))
    if origin is tuple:
        return _tuple([coercer(arg) for arg in typing.get_args(hint)])
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hasattr(hint, "_coerce"):
        return typing.cast(Coercer, hint._coerce)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum(hint)
    if hint is Any:
        return lambda value: value
    raise TypeError(f"no rule for the annotation {hint!r}")


def describe(value: Any) -> str:
    """Describe a value for error messages, in at most 60 characters: never a whole tensor."""
    if isinstance(value, (list, tuple, dict, bytes)) and len(value) > 16:
        return f"{type(value).__name__} of {len(value)} entries"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


_is_whole = re.compile(r"\s*-?[0-9]{1,99}\s*")


def _int(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, bool) and fits_index(value):
        return operator.index(value)
    # Of thousands of digits Python itself makes no number.
    if is_lenient.get() and isinstance(value, str) and _is_whole.fullmatch(value):
        return int(value)
    raise Mismatch(f"expected an int, got {describe(value)}")


def fits_index(value: Any) -> bool:
    """Whether an object stands for a whole number. An array of several numbers has `__index__` too, and cannot."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if not isinstance(value, bool) and (hasattr(value, "__float__") or hasattr(value, "__index__")):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):  # an array of several numbers, or an int beyond 1e308
            pass
    if is_lenient.get() and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    raise Mismatch(f"expected a number, got {describe(value)}")


def _str(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise Mismatch(f"expected a str, got {describe(value)}")


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool_", "bool"):  # numpy's own booleans
        return bool(value)
    if is_lenient.get() and str(value).lower() in _WORDS:
        return _WORDS[str(value).lower()]
    raise Mismatch(f"expected True or False, got {describe(value)}")


_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):  # the wire carries bytes as base64 text
        try:
            return base64.b64decode(value, validate=True)
        except ValueError as error:
            raise Mismatch(f"expected bytes or base64 text, got {describe(value)} ({error})") from None
    raise Mismatch(f"expected bytes, got {describe(value)}")


def _datetime(value: Any) -> dt.datetime:
    if isinstance(value, dt.datetime):
        return value
    if isinstance(value, str):
        try:
            return dt.datetime.fromisoformat(value)
        except ValueError:
            raise Mismatch(f"expected an ISO 8601 time, got {describe(value)}") from None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            # As pydantic does: what would lie 600 years ahead in seconds is meant in milliseconds.
            return dt.datetime.fromtimestamp(value / 1000 if abs(value) > 2e10 else value, dt.UTC)
        except (ValueError, OverflowError, OSError):
            raise Mismatch(f"expected a time, got {describe(value)}") from None
    raise Mismatch(f"expected a time, got {describe(value)}")


_SCALARS: dict[Any, Coercer] = {
    int: _int,
    float: _float,
    str: _str,
    bool: _bool,
    bytes: _bytes,
    dt.datetime: _datetime,
}


def _literal(choices: tuple[Any, ...]) -> Coercer:
    def check(value: Any) -> Any:
        for choice in choices:
            # True == 1 in Python, but neither is meant by the other.
            if (
                isinstance(value, type(choice))
                and isinstance(value, bool) == isinstance(choice, bool)
                and value == choice
            ):
                return choice
        raise Mismatch(f"expected one of {', '.join(map(repr, choices))}, got {describe(value)}")

    return check


def _enum(kind: type[enum.Enum]) -> Coercer:
    # An enum with a `parse` of its own says itself what it makes of an unknown word.
    read = getattr(kind, "parse", kind)

    def check(value: Any) -> Any:
        try:
            return read(value)
        except ValueError:
            raise Mismatch(f"expected one of {', '.join(repr(m.value) for m in kind)}, got {describe(value)}") from None

    return check


def _union(arms: tuple[Any, ...]) -> Coercer:
    optional = type(None) in arms
    rest = [arm for arm in arms if arm is not type(None)]
    if len(rest) == 1:
        inner = coercer(rest[0])
        return lambda value: None if value is None else inner(value)
    # Values name the field and the word that tell them apart ("type": "adamw"); no arm is guessed when one is named.
    by_tag = {arm._tag: coercer(arm) for arm in rest if getattr(arm, "_tag", None)}
    tag_fields = {field for field, _ in by_tag}
    plain = [coercer(arm) for arm in rest]

    def check(value: Any) -> Any:
        if value is None and optional:
            return None
        if tag_fields and isinstance(value, Mapping):
            for field in tag_fields:
                named = by_tag.get((field, str(value.get(field))))
                if named is not None:
                    return named(value)
        furthest: Mismatch | None = None
        try:
            for arm in plain:
                try:
                    return arm(value)
                except Mismatch as error:
                    # The arm that got furthest inside the value tells most.
                    if furthest is None or len(error.place) > len(furthest.place):
                        furthest = error
            assert furthest is not None
            raise furthest
        finally:
            # Its traceback has this frame and all callers, with the request's body: a cycle that only a full garbage
            # collection would end. It was made by every request with a union that the first arm did not take.
            del furthest

    return check


_EXACT: dict[Coercer, type] = {_int: int, _float: float, _str: str}


def _list(item: Coercer) -> Coercer:
    # The common hot case is a list of token ids or log-probabilities: a C-level pass instead of a call per entry.
    exact = _EXACT.get(item)

    def check(value: Any) -> list[Any]:
        values = list(entries(value, "a list"))
        if exact is not None and set(map(type, values)) <= {exact}:
            return values
        return [_at(item, index, entry) for index, entry in enumerate(values)]

    return check


def entries(values: Any, what: str) -> Sequence[Any]:
    """Return a run of values, which may be an array, as something that has a length."""
    if type(values) is list or type(values) is tuple or type(values) is NumberPieces:
        return values
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise Mismatch(f"expected {what}, got {describe(values)}")
    return values if type(values) is list else list(values)


def _at(item: Coercer, index: int, entry: Any) -> Any:
    try:
        return item(entry)
    except Mismatch as error:
        raise error.inside(f"[{index}]") from None


def _mapping(key: Coercer, item: Coercer) -> Coercer:
    def check(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise Mismatch(f"expected a mapping, got {describe(value)}")
        out = {}
        for name, entry in value.items():
            try:
                out[key(name)] = item(entry)
            except Mismatch as error:
                raise error.inside(f"[{name!r}]") from None
        return out

    return check


def _tuple(parts: list[Coercer]) -> Coercer:
    def check(value: Any) -> tuple[Any, ...]:
        values = entries(value, "a list")
        if len(values) != len(parts):
            raise Mismatch(f"expected {len(parts)} entries, got {len(values)}")
        return tuple(_at(part, index, entry) for index, (part, entry) in enumerate(zip(parts, values, strict=True)))

    return check
