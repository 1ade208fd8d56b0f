"""`docs/requirements.md` names tests that exist for every promise."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "requirements.md"


def promises() -> dict[str, list[str]]:
    """Return the tests of each promise."""
    rows = re.findall(r"^\| (?!promise \|)([^|]+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {sentence: re.findall(r"`(test_\w+)`", tests) for sentence, tests in rows}


def test_every_promise_is_a_sentence_with_a_test() -> None:
    assert len(promises()) > 60
    assert [sentence for sentence, tests in promises().items() if not sentence.endswith(".") or not tests] == []


def test_every_test_named_for_a_promise_exists() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in HERE.rglob("test_*.py"))
    existing = set(re.findall(r"def (test_\w+)\(", text))
    assert sorted({name for names in promises().values() for name in names} - existing) == []


def test_no_docstring_speaks_of_papers_outside_the_repository() -> None:
    """Codes of rows and names of private notes say nothing to a reader."""
    code = re.compile(
        r"\b[Rr]ows? [TCHO]\d|\((?:row )?[TCHO]\d+\)|(?:Defect|defect)s? \d|§"
        r"|\b(?:better|decisions|protocol|surface|losses|peers|engine-notes|architecture)\.md\b"
    )
    roots = [HERE, HERE.parent / "src", HERE.parent / "scripts", HERE.parent / "examples", HERE.parent / "docs"]
    files = [path for root in roots for kind in ("*.py", "*.md", "*.js", "*.c", "*.h") for path in root.rglob(kind)]
    # Only links to pages that exist may end in such a name.
    wrong = [
        f"{path.relative_to(HERE.parent)}: {line.strip()}"
        for path in files
        if path != Path(__file__) and "compat/golden/requests" not in path.as_posix()
        for line in path.read_text(encoding="utf-8").splitlines()
        if code.search(re.sub(r"[\w-]+/[\w./-]*\.md|[\w]+[-_][\w.-]*\.md|ARCHITECTURE\.md", "", line))
    ]
    assert len(files) > 300
    assert wrong == []
