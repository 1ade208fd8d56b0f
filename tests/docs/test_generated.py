"""The tables that are made from the code are up to date, and the check notices when they are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import make_docs
from tests.docs.pages import ROOT


def test_the_made_parts_of_the_pages_say_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for page in make_docs.MADE:
        (tmp_path / page).write_text((ROOT / "docs" / page).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(make_docs, "DOCS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", make_docs.MADE)
def test_a_page_that_was_edited_is_noticed_and_mended(
    page: str, copies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = (copies / page).read_text(encoding="utf-8")
    (copies / page).write_text(right.replace("| `", "| edited `", 1), encoding="utf-8")
    assert make_docs.main(["--check"]) == 1
    assert page in capsys.readouterr().err
    assert make_docs.main([]) == 0
    assert (copies / page).read_text(encoding="utf-8") == right


def test_a_page_without_its_marks_is_refused(copies: Path) -> None:
    (copies / "cli.md").write_text("# The command\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="marks"):
        make_docs.main([])
