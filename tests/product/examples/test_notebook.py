"""The notebook is the first example: the same code, and it runs from top to bottom in a real kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts import make_notebook
from tests.integration.service.live import LiveServer
from tests.product.examples.conftest import ROOT, TINY


def test_the_notebook_has_the_code_of_the_program() -> None:
    made = make_notebook.cells(make_notebook.PROGRAM.read_text(encoding="utf-8"))
    assert make_notebook.read(make_notebook.NOTEBOOK) == made
    assert make_notebook.main(["--check"]) == 0
    code = "\n".join(cell.source for cell in made if cell.kind == "code")
    assert "parse_args" not in code
    assert all(line in code for line in ("tinkex.local(MODEL)", "forward_backward(", "optim_step(", "close()"))


def test_a_program_changed_without_its_notebook_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / make_notebook.PROGRAM.name
    changed.write_text(make_notebook.PROGRAM.read_text(encoding="utf-8").replace("rank=16", "rank=8"), encoding="utf-8")
    monkeypatch.setattr(make_notebook, "PROGRAM", changed)
    assert make_notebook.main(["--check"]) == 1
    assert "make_notebook.py" in capsys.readouterr().err


def test_the_notebook_outputs_are_real_small_and_without_local_paths() -> None:
    text = make_notebook.NOTEBOOK.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    outputs = ["".join(output["text"]) for cell in cells for output in cell.get("outputs", [])]
    printed = "\n".join(outputs)
    assert "16 conversations, 19 answers to learn" in printed
    assert printed.count("Where do I buy a ticket? →") == 2
    assert "Ahoy!" in printed.rpartition("Where do I buy a ticket? →")[2], "it has learnt what the data say"
    assert len(text) < 20_000
    assert not re.search(r"/(home|root|tmp|work|Users|usr|var)/|127\.0\.0\.1|\x1b", printed)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(live: LiveServer, folders: dict[str, str]) -> None:
    made = make_notebook.read(make_notebook.NOTEBOOK)
    # As a user would edit its settings; the rest is as it is.
    edited = [cell._replace(source=cell.source.replace('"smollm2-135m", 20', f'"{TINY}", 4')) for cell in made]
    assert edited != made
    printed = make_notebook.run(
        edited, ROOT / "examples", 120, TINKER_BASE_URL=live.url, TINKER_API_KEY="tml-notebook", **folders
    )
    assert any("4 steps · loss" in text for text in printed)
    assert "weights/harbour" in printed[-1]
