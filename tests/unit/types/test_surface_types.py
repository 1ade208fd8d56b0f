"""Our types against the official ones, release by release, from the recorded surfaces, and what they import."""

from __future__ import annotations

import datetime as dt
import json
import re
import subprocess
import sys
import types as pytypes
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tinkex.types as types
from tinkex.types.base import REQUIRED, Fresh, Value

SURFACES = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[2] / "compat/golden/surface").glob("*.json"))
}
RELEASES = ["0.36.0", "0.4.1"]

# Where one class must serve all releases, or reads more than they do; each with its reason.
DEPARTURES = {
    ("Datum", "loss_fn_inputs"): "required in 0.4.1, optional later",
    ("ForwardBackwardOutput", "metrics"): "required in 0.4.1, optional later",
    ("ImageChunk", "height"): "only in 0.4.1",
    ("ImageChunk", "tokens"): "only in 0.4.1",
    ("ImageChunk", "width"): "only in 0.4.1",
    ("ImageAssetPointerChunk", "height"): "only in 0.4.1",
    ("ImageAssetPointerChunk", "tokens"): "only in 0.4.1",
    ("ImageAssetPointerChunk", "width"): "only in 0.4.1",
    ("LoadWeightsRequest", "model_id"): "required in 0.4.1, optional later",
    ("LoadWeightsRequest", "optimizer"): "not in 0.4.1, whose requests mean False",
    ("OptimStepRequest", "adam_params"): "the name in 0.4.1",
    ("OptimStepRequest", "optim_params"): "the name since 0.30",
    ("SampledSequence", "sequence_id"): "not in 0.4.1, and other servers leave it out",
    ("TelemetryBatch", "process_uuid"): "not in 0.4.1",
    ("TelemetrySendRequest", "process_uuid"): "not in 0.4.1",
}


def cases(kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    return [
        (release, name)
        for release in RELEASES
        for name, described in SURFACES[release]["types"].items()
        if described["kind"] in kinds
    ]


def described(release: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = SURFACES[release]["types"][name]
    return found


def default_of(kind: type[Value], field: str) -> Any:
    default = kind._defaults[field]
    return default.make() if isinstance(default, Fresh) else default


@pytest.mark.parametrize("release", RELEASES)
def test_every_exported_name_exists(release: str) -> None:
    missing = [name for name in SURFACES[release]["types_names"] if not hasattr(types, name)]
    assert not missing


@pytest.mark.parametrize(("release", "name"), cases(("pydantic", "dataclass")))
def test_fields_and_defaults_are_the_official_ones(release: str, name: str) -> None:
    kind = getattr(types, name)
    for row in described(release, name)["fields"]:
        field = row["name"]
        if field.startswith("_") or field.endswith("_np"):
            assert field.startswith("_") or isinstance(getattr(kind, field), property), field
            continue
        assert field in kind._defaults, f"{name}.{field} is missing"
        ours = default_of(kind, field)
        if (name, field) in DEPARTURES:
            assert ours is not REQUIRED
        elif row["required"]:
            assert ours is REQUIRED, f"{name}.{field} is required in {release}, but has the default {ours!r}"
        elif "default_factory" in row:
            assert ours in ({}, []) and type(ours).__name__ == row["default_factory"]
        elif isinstance(ours, Value):
            shown = ", ".join(f"{key}={value!r}" for key, value in ours.model_dump().items())
            assert f"{type(ours).__name__}({shown})" == row["default"]
        else:
            assert str(ours) == row["default"] or repr(ours) == row["default"], f"{name}.{field}"


@pytest.mark.parametrize(("release", "name"), cases(("pydantic", "dataclass")))
def test_official_methods_and_properties_exist(release: str, name: str) -> None:
    pydantic_hooks = {"serialize_data", "validate_data", "serialize_dmel", "validate_dmel", "convert_tensors"}
    official = described(release, name)
    wanted = {*official.get("methods", ()), *official.get("properties", ())} - pydantic_hooks
    assert not [member for member in wanted if not hasattr(getattr(types, name), member)]


@pytest.mark.parametrize(("release", "name"), cases(("enum", "alias")))
def test_enums_and_aliases_have_the_official_words(release: str, name: str) -> None:
    official, ours = described(release, name), getattr(types, name)
    if official["kind"] == "enum":
        assert {member.name: member.value for member in ours} == official["members"]
    elif official["is"].startswith("Literal["):
        words = set(json.loads(official["is"].removeprefix("Literal").replace("'", '"')))
        extra = {"kl_divergence"} if name == "LossFnType" else set()
        # A later release may only have added words.
        assert words <= set(typing.get_args(ours)) <= words | extra or release == "0.4.1"
    elif official["is"] == "str":
        assert ours is str
    elif "Dict[" in official["is"]:
        assert typing.get_origin(ours) is dict
    elif "List[" in official["is"]:
        assert typing.get_origin(ours) is list
    else:
        members = {member.__name__ for member in typing.get_args(ours)}
        assert members, f"{name} is no union"
        official_members = set(re.findall(r"\w+", official["is"])) & set(SURFACES[release]["types"])
        assert official_members <= members
        assert official_members or "Base" in official["is"]


OPTIONALS = sorted(
    (name, row["name"])
    for name, official in SURFACES["0.4.1"]["types"].items()
    for row in official.get("fields", ())
    if "Optional" in row["annotation"] or "None" in row["annotation"]
)


def example(hint: Any) -> Any:
    """A small right value for an annotation."""
    plain = {str: "x", int: 1, float: 0.5, bool: True, bytes: b"x", Any: 1, dt.datetime: "2026-01-01T00:00:00Z"}
    if hint in plain:
        return plain[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return args[0]
    if origin in (typing.Union, pytypes.UnionType):
        return example(args[0])
    if origin is list:
        return [example(args[0])]
    if origin in (dict, Mapping):
        return {"k": example(args[1])}
    if origin is tuple:
        return tuple(example(arg) for arg in args)
    if issubclass(hint, Value):
        return hint(**required(hint))
    return next(iter(hint))  # an enum


def required(kind: type[Value]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field: example(hints[field]) for field, default in kind._defaults.items() if default is REQUIRED}


@pytest.mark.parametrize(("name", "field"), OPTIONALS)
def test_every_optional_of_0_4_1_is_absent_null_or_a_value(name: str, field: str) -> None:
    kind = getattr(types, name)
    base = {other: value for other, value in required(kind).items() if other != field}
    if name == "OptimStepRequest":
        base["adam_params"] = {}
    hint = typing.get_type_hints(kind)[field]
    if kind._defaults[field] is not REQUIRED:
        assert field not in kind(**base).model_dump(exclude_unset=True)
    assert kind(**base, **{field: None}).model_dump(exclude_unset=True)[field] is None
    value = kind(**base, **{field: example(hint)}).model_dump(exclude_unset=True)[field]
    assert value is not None


def test_there_are_optionals_to_test() -> None:
    assert ("SampleRequest", "prompt_logprobs") in OPTIONALS
    assert ("TensorData", "shape") in OPTIONALS
    assert len(OPTIONALS) > 40


def test_the_table_of_names_is_complete_and_right() -> None:
    for name in vars(types)["__all__"]:
        assert getattr(types, name) is getattr(types, name)
    homes = {
        vars(sys.modules[f"tinkex.types.{home}"])[name] is getattr(types, name) for name, home in types._HOMES.items()
    }
    assert homes == {True}
    defined = {
        name
        for home in set(types._HOMES.values())
        for name, value in vars(sys.modules[f"tinkex.types.{home}"]).items()
        if isinstance(value, type) and issubclass(value, Value) and value.__module__ == f"tinkex.types.{home}"
    }
    assert defined - set(vars(types)["__all__"]) == {"OptimizerFamily", "ProvenanceSpan"}
    assert set(vars(types)["__all__"]) <= set(dir(types))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = types.Nothing  # type: ignore[attr-defined]


def test_the_types_load_nothing_heavy() -> None:
    code = (
        "import sys, tinkex.types; [getattr(tinkex.types, name) for name in tinkex.types.__all__];"
        "heavy = ('numpy', 'torch', 'pydantic', 'typing_extensions', 'dataclasses', 'inspect', 'json', 'asyncio');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_of_the_package_loads_no_type_module() -> None:
    code = "import sys, tinkex.types; print([name for name in sys.modules if name.startswith('tinkex.types.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
