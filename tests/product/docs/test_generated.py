"""The tables that are made from the code are up to date, and the check notices when they are not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tinkex
from scripts import make_docs, make_openapi, make_reference
from tests.product.docs.pages import ROOT


def test_the_generated_parts_of_the_pages_match_the_code() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for page in make_docs.MADE:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text((ROOT / page).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(make_docs, "PAGES", tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", make_docs.MADE)
def test_an_edited_page_is_noticed_and_written_again(
    page: str, copies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = (copies / page).read_text(encoding="utf-8")
    before, mark, made = right.partition("<!-- made by")
    (copies / page).write_text(before + mark + made.replace("| `", "| edited `", 1), encoding="utf-8")
    assert make_docs.main(["--check"]) == 1
    assert page in capsys.readouterr().err
    assert make_docs.main([]) == 0
    assert (copies / page).read_text(encoding="utf-8") == right


def test_a_page_without_its_marks_is_rejected(copies: Path) -> None:
    (copies / "docs" / "cli.md").write_text("# The command\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="marks"):
        make_docs.main([])


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return make_reference.pages()


def test_the_reference_matches_the_code(reference: dict[str, str]) -> None:
    present = {path.name: path.read_text(encoding="utf-8") for path in make_reference.REFERENCE.glob("*.md")}
    stale = sorted(name for name in reference | present if reference.get(name) != present.get(name))
    assert not stale, "run python scripts/make_reference.py"


def test_every_public_name_has_a_heading_in_the_reference(reference: dict[str, str]) -> None:
    headings = {name for text in reference.values() for name in re.findall(r"^## `(\w+)`$", text, re.MULTILINE)}
    missing = {*tinkex._HOME, *vars(tinkex.types)["__all__"], *tinkex.testing.__all__} - headings
    assert not missing


def test_an_edited_or_stale_reference_page_is_noticed_and_written_again(
    reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_reference, "REFERENCE", tmp_path)
    monkeypatch.setattr(make_reference, "pages", lambda: reference)
    assert make_reference.main([]) == 0
    (tmp_path / "tinkex.errors.md").write_text("edited")
    (tmp_path / "tinkex.gone.md").write_text("of a module that is no more")
    assert make_reference.main(["--check"]) == 1
    assert "tinkex.errors.md, tinkex.gone.md" in capsys.readouterr().err
    assert make_reference.main([]) == 0
    assert make_reference.main(["--check"]) == 0
    assert not (tmp_path / "tinkex.gone.md").exists()


def test_the_openapi_document_matches_the_endpoints_and_types() -> None:
    assert make_openapi.DOCUMENT.read_text(encoding="utf-8") == make_openapi.text(), "run scripts/make_openapi.py"
