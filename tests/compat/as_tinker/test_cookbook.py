"""The public tinker-cookbook, unmodified: how it names `tinker` (always), and that all of it imports (`full`)."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from . import cookbook_forms, cookbook_imports


@pytest.mark.parametrize("form", cookbook_forms.recorded())
def test_every_import_and_name_in_the_cookbook_resolves(tinker: ModuleType, form: str) -> None:
    if " " in form:
        exec(form, {})
        return
    value: object = importlib.import_module("tinker")
    for name in form.split(".")[1:]:
        value = getattr(value, name)
    assert value is not None


def test_every_way_to_write_an_import_is_found() -> None:
    source = (
        "import tinker\nimport tinker.types\nfrom tinker import types as t\nfrom tinker.types.datum import Datum\n"
        "x: 'tinker.Datum' = t.ModelInput.from_ints([1])\ny = Datum(tinker.types.StopReason)\nother.tinker.Nothing\n"
    )
    assert set(cookbook_forms.forms_in(source)) == {
        "import tinker",
        "import tinker.types",
        "from tinker import types",
        "from tinker.types.datum import Datum",
        "tinker.Datum",
        "tinker.types.ModelInput",
        "tinker.types.ModelInput.from_ints",
        "tinker.types",
        "tinker.types.StopReason",
    }


@pytest.mark.full
def test_every_cookbook_module_that_imports_with_the_official_package_imports_through_the_alias() -> None:
    place = cookbook_imports.ENVIRONMENT
    outcomes = cookbook_imports.run(place, cookbook_imports.python_of(place))
    assert cookbook_imports.lost(outcomes) == []
    assert sum(not seen.official for seen in outcomes.values()) > 250, (
        "too few import at all: is the environment sound?"
    )
