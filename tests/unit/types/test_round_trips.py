"""Every public value survives dump and validation, as Python values and as JSON, with the fields that were set."""

from __future__ import annotations

import datetime as dt
import enum
import pickle
import types as pytypes
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from tinkex import types
from tinkex.errors import ValidationError
from tinkex.types.base import REQUIRED, Value

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**31 - 1),  # what a token id, a count and an offset have in common
    float: st.floats(0, 0.5, width=32),
    str: st.text(min_size=1, max_size=5),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    dt.datetime: st.datetimes(timezones=st.just(dt.UTC)),
    type(None): st.none(),
    Any: st.none() | st.integers(0, 9) | st.text(max_size=3),
    object: st.integers(0, 9) | st.text(max_size=3),
}
OF_THEIR_OWN = {
    "TensorData": st.lists(st.integers(-9, 9), min_size=1, max_size=4).map(types.TensorData),
    # Without spans: JSON has no field for them, so nothing there tells the two kinds apart.
    "Datum": st.lists(st.integers(0, 99), min_size=1, max_size=4).map(
        lambda tokens: types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": tokens})
    ),
    "TopkLogprobs": st.just(types.TopkLogprobs.from_lists([[(1, -0.5)]])),
    "ModelInput": st.lists(st.integers(0, 99), min_size=1, max_size=4).map(types.ModelInput.from_ints),
}
"""Values whose constructors do not take their fields."""


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return strategy(arguments[0])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, pytypes.UnionType):
        return st.one_of(*map(strategy, arguments))
    if origin in (list, Sequence):
        return st.lists(strategy(arguments[0]), max_size=3)
    if origin in (dict, Mapping):
        return st.dictionaries(st.text(min_size=1, max_size=3), strategy(arguments[1]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(strategy, arguments))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and issubclass(hint, Value):
        return OF_THEIR_OWN.get(hint.__name__) or values(hint)
    return SCALARS[getattr(hint, "__supertype__", hint)]


def values(cls: type[Value]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {name: strategy(hints[name]) for name in cls._defaults}
    if cls._tag is not None:  # a union finds the class by this word
        fields[cls._tag[0]] = st.just(cls._tag[1])
    required = {name: fields[name] for name, default in cls._defaults.items() if default is REQUIRED}
    optional = {name: fields[name] for name in fields if name not in required}

    def make(given: dict[str, Any]) -> Value:
        try:
            return cls(**given)
        except ValidationError:  # of fields that exclude each other
            reject()

    return st.fixed_dictionaries(required, optional=optional).map(make)


CLASSES = [
    cls
    for name in sorted(vars(types)["__all__"])
    if isinstance(cls := getattr(types, name), type) and issubclass(cls, Value) and name not in OF_THEIR_OWN
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_value_survives_dump_and_validation(cls: type[Value]) -> None:
    @settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(values(cls))
    def check(value: Value) -> None:
        assert cls.model_validate(value.model_dump()) == value
        assert cls.model_validate(value.model_dump(mode="json")) == value
        again = cls.model_validate_json(value.model_dump_json())
        assert again == value and hash(again) == hash(value)
        assert value.model_dump(exclude_unset=True).keys() == value.model_fields_set
        copies = (pickle.loads(pickle.dumps(value)), value.model_copy())
        assert all(copy == value and copy.model_fields_set == value.model_fields_set for copy in copies)

    check()


def test_optimizers_of_two_kinds_differ() -> None:
    """They used to be equal: NotImplemented, which `==` of another class returns, counted as true."""
    assert types.AdamOptimizerConfig() != types.DimuonOptimizerConfig()
    assert types.DimuonParams(learning_rate=1.0) != types.AdamParams(learning_rate=1.0)


def test_a_field_with_a_capital_is_rejected_where_the_class_is_made() -> None:
    """It used to vanish in silence: `topK` was no field, and no constructor took it."""
    metaclass: Any = type(Value)
    with pytest.raises(TypeError, match=r"Wrong\.topK: a field's name is lower-case"):
        metaclass("Wrong", (Value,), {"__annotations__": {"topK": "int"}, "__module__": __name__})
