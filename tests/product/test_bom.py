"""The bill of materials names what is pinned, and a licence that is not allowed is noticed."""

from __future__ import annotations

import json

import pytest

from scripts import make_bom


def test_the_bill_of_materials_has_every_pinned_package_and_is_up_to_date() -> None:
    assert make_bom.main(["--check"]) == 0
    bom = json.loads(make_bom.BOM.read_text(encoding="utf-8"))
    assert {entry["name"]: entry["version"] for entry in bom["components"]} == make_bom.pinned()
    required = {entry["name"] for entry in bom["components"] if entry["scope"] == "required"}
    assert {"h2", "orjson", "protobuf", "zstandard"} <= required and "torch" not in required


@pytest.mark.parametrize("expression", ["GPL-3.0-only", "AGPL-3.0", "MIT AND Proprietary", "", "NOASSERTION"])
def test_a_licence_that_is_not_allowed_is_named(expression: str) -> None:
    component = {"name": "new", "version": "1", "licenses": [{"expression": expression}]}
    [sentence] = make_bom.rejected_licences([component])
    assert "new 1" in sentence and expression in sentence


def test_an_audit_that_asked_nobody_does_not_say_that_all_is_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind a mirror pip-audit skips every package and reports no vulnerabilities."""
    from tests import tools

    def missing(tool: str) -> object:
        raise tools.ToolMissing("no index")

    monkeypatch.setattr(tools, "make", missing)
    assert make_bom.audit() == 0
    assert "Nothing was audited" in capsys.readouterr().out
