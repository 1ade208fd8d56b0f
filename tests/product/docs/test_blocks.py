"""Every block of code in the documents runs, and every command they give exists."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from types import CodeType

import pytest

from tests.product.docs.pages import GUIDES, PAGES, REFERENCE, ROOT, Block, blocks, named
from tinkex import as_tinker
from tinkex.cli.parser import build_parser

# `test_guides` runs the guides, `test_docstrings` the examples in the reference, where they come from.
OF_PAGES = [page for page in PAGES if page not in (*GUIDES, *REFERENCE)]
WITH_PYTHON = [page for page in OF_PAGES if any(block.kind == "python" for block in blocks(page))]
COMMANDS = [
    (page, line) for page in PAGES for block in blocks(page) if block.kind == "bash" for line in block.text.splitlines()
]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"__name__": "__main__"}
    monkeypatch.setenv("TINKEX_CACHE_DIR", str(ROOT / ".cache"))  # the README trains a real model: load it once
    try:
        for block in blocks(page):
            if block.kind == "python":
                exec(compiled(page, block), space)
    finally:
        as_tinker.uninstall()  # two pages install it


def compiled(page: Path, block: Block) -> CodeType:
    """With its place in the page, so that a traceback points there."""
    return compile("\n" * block.line + block.text, str(page), "exec")


def test_there_is_code_to_run_and_no_block_is_left_out() -> None:
    assert ROOT / "README.md" in WITH_PYTHON
    runnable = [page for page in PAGES if page not in REFERENCE]
    kinds = {block.kind for page in runnable for block in blocks(page) if block.kind.startswith(("py", "sh"))}
    assert kinds == {"python"}, "a block of another kind is not run"


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{named(page)}: {line}" for page, line in COMMANDS])
def test_every_command_in_a_page_exists(page: Path, line: str) -> None:
    line = re.sub(r"^export \w+=\$\((.*)\)$", r"\1", line)
    command, _, arguments = line.partition("#")[0].strip().partition(" ")
    words = shlex.split(arguments)
    match command:
        case "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert words[0] in targets
        case "tinkex":
            words = list(itertools.takewhile(lambda word: word != "<", words))
            assert build_parser(words).parse_args(words).run is not None  # or ends the process, as a command would
        case "python" | "python3":
            is_file = words[0].endswith(".py") and (ROOT / words[0]).is_file()
            assert is_file or words[:2] in (["-m", "tinkex.as_tinker"], ["-m", "venv"])
        case _:
            assert command in ("", "pip", "git", "cd", "export", "source", "ls", "mkdir", "openssl", "umask"), (
                f"{line!r} is checked by nobody"
            )
