"""`make prepare` fetches what tests need; tests themselves fetch nothing, and a missing browser is one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import prepare


@pytest.fixture
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.usefixtures("no_browser")
@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_a_missing_browser_is_one_sentence_and_an_error_only_in_ci(
    ci: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", ci)
    assert prepare.main(["browser"]) == code
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1 and "apt-get install chromium" in sentence


@pytest.mark.usefixtures("no_browser")
@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_tests_of_the_console_are_skipped_without_a_browser_but_fail_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.product.console import browser

    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="make prepare"):
        browser.chromium()


@pytest.mark.slow
def test_pip_has_no_index_inside_pytest(tmp_path: Path) -> None:
    words = ["download", "--no-deps", "--disable-pip-version-check", "--dest", str(tmp_path), "pip"]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "No matching distribution found for pip" in done.stderr
    assert list(tmp_path.iterdir()) == []
