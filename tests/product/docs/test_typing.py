"""The public names are known to type checkers: a misspelt one is an error, and none is Any in disguise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tinkex
from tests.product.docs.pages import ROOT


def mypy(*files: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_public_name_has_a_type_and_no_other_name_exists(tmp_path: Path) -> None:
    types = vars(tinkex.types)["__all__"]
    names = [*(f"tinkex.{name}" for name in tinkex.__all__), *(f"tinkex.types.{name}" for name in types)]
    program = tmp_path / "names.py"
    program.write_text("\n".join(["import tinkex", *(f"reveal_type({name})" for name in names)]) + "\n")
    said = mypy(program)
    assert said.count("Revealed type is") == len(names)
    assert re.findall(r"^.*:\d+: error: .*$", said, re.MULTILINE) == []
    assert 'Revealed type is "Any"' not in said, said
    program.write_text("import tinkex\ntinkex.ServiceCleint\n")
    assert 'Module has no attribute "ServiceCleint"' in mypy(program)
