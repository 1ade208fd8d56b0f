"""Replays the kept inputs of the fuzzer: those that once failed, and those that reach most of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(file for file in CORPUS.rglob("*") if file.is_file())
MAX_CORPUS_BYTES = 200_000


@pytest.mark.parametrize("file", INPUTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_kept_input_breaks_its_codec(file: Path) -> None:
    TARGETS[file.parent.name](file.read_bytes())


def test_every_codec_has_a_small_corpus() -> None:
    assert {file.parent.name for file in INPUTS} == TARGETS.keys()
    assert sum(file.stat().st_size for file in INPUTS) < MAX_CORPUS_BYTES
