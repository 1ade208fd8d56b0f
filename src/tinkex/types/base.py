"""`Value`: the base of every type users touch. Frozen, keyword-only, slotted, comparable.

A value remembers which fields its maker passed, so that a field has three states on the wire: absent, null, value.
The `model_*` names are those that users of pydantic models expect; pydantic itself is not needed.
"""

from __future__ import annotations

import base64
import datetime as dt
import enum
import typing
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from tinkex.errors import ValidationError
from tinkex.types.coerce import Coercer, Mismatch, coercer, describe

REQUIRED: Any = object()
_SLOT: Any = object()
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>"})()
"""The default of an argument, to distinguish "not passed" from "passed as None"."""
_SECRETS = frozenset(("jwt", "weights_access_token"))


class Fresh:
    """A default that is made for each value, so that no two values share a list."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def field(*, default_factory: Callable[[], Any] | None = None, init: bool = True) -> Any:
    """Declare a field whose default is made for each value, or (`init=False`) a slot that is no field."""
    return _SLOT if not init else Fresh(default_factory) if default_factory is not None else REQUIRED


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class ValueType(type):
    """Turns the annotations of a class body into slots and remembers the defaults.

    Every annotation is a field unless it is `field(init=False)` or begins with _; a field's name is lower-case.

    `kw_only=False` lets the constructor take the fields by position too; `tag=("event", "SESSION_END")` names the field
    and the word by which a union of values finds this class (by default its `type` field).
    """

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        space: dict[str, Any],
        *,
        kw_only: bool = True,
        tag: tuple[str, str] | None = None,
    ) -> ValueType:
        slots = [name for name in space.get("__annotations__", {}) if space.get(name) is _SLOT]
        for slot in slots:
            del space[slot]
        own = [field for field in space.get("__annotations__", {}) if field not in slots and not field.startswith("_")]
        if wrong := [field for field in own if not field.islower()]:
            raise TypeError(f"{name}.{wrong[0]}: a field's name is lower-case; other annotations begin with _.")
        defaults: dict[str, Any] = {}
        for base in reversed(bases):
            defaults |= getattr(base, "_defaults", {})
        inherited = tuple(defaults)
        defaults |= {field: space.pop(field, REQUIRED) for field in own}
        space["__slots__"] = (*(field for field in own if field not in inherited), *slots)
        space["_defaults"] = defaults
        space["_positions"] = () if kw_only else tuple(defaults)
        space["__match_args__"] = tuple(defaults)
        if tag is None and isinstance(defaults.get("type"), str):
            tag = ("type", defaults["type"])
        space["_tag"] = tag
        space["_coercers"] = None
        return super().__new__(mcls, name, bases, space)


class Value(metaclass=ValueType):
    """A frozen record. Unknown field names are rejected in a constructor and ignored by `model_validate`."""

    _defaults: ClassVar[dict[str, Any]]
    _positions: ClassVar[tuple[str, ...]]
    _coercers: ClassVar[dict[str, Coercer] | None]
    _tag: ClassVar[tuple[str, str] | None]
    _given: frozenset[str] = field(init=False)

    def __init__(self, *args: Any, **given: Any) -> None:
        if args:
            given = self._place(args, given)
        self._fill(given)

    @classmethod
    def _place(cls, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
        """Arguments by position, under their names."""
        if len(args) > len(cls._positions):
            raise TypeError(f"{cls.__name__} takes {len(cls._positions)} arguments by position, got {len(args)}")
        placed = dict(zip(cls._positions, args, strict=False))
        if twice := placed.keys() & given.keys():
            raise TypeError(f"{cls.__name__} got {', '.join(sorted(twice))} twice")
        return placed | given

    def _fill(self, given: Mapping[str, Any]) -> None:
        """Check every field and freeze. A constructor of a subclass ends here."""
        cls = type(self)
        coercers = cls._coercers or _compile(cls)
        put = object.__setattr__
        for field, default in cls._defaults.items():
            if field in given:
                try:
                    put(self, field, coercers[field](given[field]))
                except Mismatch as error:
                    raise ValidationError(f"{cls.__name__}.{field}{error.place}: {error.reason}") from None
            elif default is REQUIRED:
                raise ValidationError(f"{cls.__name__} needs {field!r}. {_usage(cls)}")
            else:
                put(self, field, default.make() if type(default) is Fresh else default)
        if len(given) > len(cls._defaults) or not given.keys() <= cls._defaults.keys():
            unknown = sorted(given.keys() - cls._defaults.keys())
            raise ValidationError(f"{cls.__name__} has no {', '.join(map(repr, unknown))}. {_usage(cls)}")
        put(self, "_given", frozenset(given))
        self._check()

    def _check(self) -> None:
        """Rules that hold between fields, or beyond their types: raise ValidationError."""

    @classmethod
    def _coerce(cls, value: Any) -> Self:
        """How a field annotated with this class reads what it is given."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            try:
                return cls.model_validate(value)
            except ValidationError as error:
                raise Mismatch(str(error)) from None
        raise Mismatch(f"expected {cls.__name__}, got {describe(value)}")

    @property
    def model_fields_set(self) -> set[str]:
        """The fields that were passed, as against left at their default."""
        return set(self._given)

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Read a value from a mapping; fields this class does not know are ignored."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ValidationError(f"{cls.__name__}: expected a mapping of its fields, got {describe(obj)}")
        known = cls._defaults
        for name, default in known.items():
            if default is REQUIRED and name not in obj:
                raise ValidationError(f"{cls.__name__} needs {name!r}. {_usage(cls)}")
        return cls(**{name: value for name, value in obj.items() if name in known})

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        import json

        return cls.model_validate(json.loads(text))

    @classmethod
    def model_construct(cls, **fields: Any) -> Self:
        """Build without checks, for values that are known to be right."""
        self = cls.__new__(cls)
        put = object.__setattr__
        for field, default in cls._defaults.items():
            if field in fields:
                put(self, field, fields[field])
            elif default is not REQUIRED:
                put(self, field, default.make() if type(default) is Fresh else default)
        put(self, "_given", frozenset(fields))
        return self

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Collection[str] | None = None,
        exclude: Collection[str] = (),
        exclude_unset: bool = False,
        exclude_none: bool = False,
    ) -> dict[str, Any]:
        """The fields as plain dicts and lists, as declared; `mode="json"` also renders bytes, times and enums.

        `include` and `exclude` name fields of this value; the two flags hold for the values inside it as well.
        """
        out = {}
        for field in self._defaults:
            if (exclude_unset and field not in self._given) or field in exclude:
                continue
            if include is not None and field not in include:
                continue
            value = getattr(self, field)
            if exclude_none and value is None:
                continue
            out[field] = _plain(value, mode, exclude_unset, exclude_none)
        return out

    def model_dump_json(
        self, *, indent: int | None = None, exclude_unset: bool = False, exclude_none: bool = False
    ) -> str:
        import json

        fields = self.model_dump(mode="json", exclude_unset=exclude_unset, exclude_none=exclude_none)
        return json.dumps(fields, indent=indent, separators=(",", ":" if indent is None else ": "), ensure_ascii=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed; the changed fields are checked again."""
        fields = {field: getattr(self, field) for field in self._given}
        if deep:
            import copy

            fields = copy.deepcopy(fields)
        return type(self)(**{**fields, **(update or {})})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{type(self).__name__} is frozen: use model_copy(update={{{name!r}: ...}}) to get a changed one."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name!r} cannot be deleted.")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, field) == getattr(other, field) for field in self._defaults)

    def __hash__(self) -> int:
        return hash((type(self), *(_hashable(getattr(self, field)) for field in self._defaults)))

    def __repr__(self) -> str:
        if not hasattr(self, "_given"):  # a traceback shows the value whose constructor is refusing something
            return f"<{type(self).__name__}, not finished>"
        named = (f for f in self._defaults if f in self._given or self._defaults[f] is REQUIRED)
        shown = (f"{f}={'<hidden>' if f in _SECRETS else _short(getattr(self, f))}" for f in named)
        return f"{type(self).__name__}({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {field: getattr(self, field) for field in self._given})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Lets a pydantic model have fields of this type."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls.model_validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value, info: value.model_dump(mode=info.mode), info_arg=True
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        return {"type": "object", "title": cls.__name__}


class LazyValue(Value):
    """A value that keeps what it was made from, and makes some of its fields (lists of numbers) on first use."""

    _makers: ClassVar[Mapping[str, Callable[[Any], Any]]]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Reached when a slot is empty.
            if name not in self._makers:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            made = self._makers[name](self)
            object.__setattr__(self, name, made)
            return made


def _compile(cls: type[Value]) -> dict[str, Coercer]:
    hints = typing.get_type_hints(cls, include_extras=True)
    coercers = {field: coercer(hints[field]) for field in cls._defaults}
    type.__setattr__(cls, "_coercers", coercers)
    return coercers


def _rebuild(cls: type[Value], fields: dict[str, Any]) -> Value:
    return cls(**fields)


def _usage(cls: type[Value]) -> str:
    def shown(default: Any) -> str:
        return repr(default.make() if type(default) is Fresh else default)

    names = (name if default is REQUIRED else f"{name}={shown(default)}" for name, default in cls._defaults.items())
    return f"Fields: {', '.join(names)}."


def _plain(value: Any, mode: str, exclude_unset: bool, exclude_none: bool) -> Any:
    if isinstance(value, Value):
        return value.model_dump(mode=mode, exclude_unset=exclude_unset, exclude_none=exclude_none)
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) in (int, float, str):  # long runs of tokens: no call per entry
            return list(value)
        return [_plain(entry, mode, exclude_unset, exclude_none) for entry in value]
    if isinstance(value, dict):
        return {name: _plain(entry, mode, exclude_unset, exclude_none) for name, entry in value.items()}
    if mode == "json":
        if isinstance(value, (bytes, bytearray, memoryview)):
            return base64.b64encode(value).decode()
        if isinstance(value, dt.datetime):
            return value.isoformat().replace("+00:00", "Z")
        if isinstance(value, enum.Enum):
            return value.value
    return value


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return frozenset((name, _hashable(entry)) for name, entry in value.items())
    return value


def _short(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"[{', '.join(map(_short, value[:4]))}, … {len(value)} in all]"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
