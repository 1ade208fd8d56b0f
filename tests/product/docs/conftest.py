"""A service for the documents to run against: it offers the model that they name, with a tokenizer of single bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from tinkex.testing import ScriptedService

MODEL = "Qwen/Qwen3-8B"
OTHER_MODEL = "tinkex/tiny"
KEY = "tml-documents"


@pytest.fixture
def scripted() -> Iterator[ScriptedService]:
    with ScriptedService(
        base_models=[MODEL, OTHER_MODEL],
        api_key=KEY,
        tokenizers={MODEL: {"tokenizer.json": tokenizer_json()}},
        vocabulary=256,
    ) as running:
        yield running


@pytest.fixture
def variables(scripted: ScriptedService, tmp_path: Path) -> dict[str, str]:
    """What a user would set, and folders of the test's own where the user's home would be."""
    return {
        "TINKER_BASE_URL": scripted.url,
        "TINKER_API_KEY": KEY,
        "TINKEX_CACHE_DIR": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_DATA_HOME": str(tmp_path / "home"),
    }


@pytest.fixture
def environment(variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The same for code that runs in this process, in a folder of its own."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return variables


def tokenizer_json() -> bytes:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend.to_str().encode()
