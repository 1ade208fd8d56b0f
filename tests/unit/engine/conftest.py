"""Base models for the engine's tests, loaded once. `make prepare` fetches SmolLM2 into the checkout's `.cache`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import prepare
from tests.prepare import CACHE
from tests.unit.engine import oracle
from tests.unit.engine.oracle import randomise
from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import LoraSpec, ModelInfo
from tinkex.engine.models import loaded_model, registry

CPU = torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(params=["packed", "general"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on both runners. The built-in models are all Llama-shaped: left to itself, the engine packs them."""
    name: str = request.param
    monkeypatch.setattr(oracle, "RUNNER", {"packed": "auto"}.get(name, name))
    return name


@pytest.fixture(scope="session")
def tiny_info() -> ModelInfo:
    return registry.resolve("tinkex/tiny", CACHE)


@pytest.fixture(scope="session")
def tiny(tiny_info: ModelInfo) -> loaded_model.Model:
    return loaded_model.load(tiny_info, CPU, torch.float32)


@pytest.fixture(scope="session")
def smollm2_info() -> ModelInfo:
    """From the GGUF on every machine, also where the hub or its cache would have the model."""
    return prepare.model()


@pytest.fixture(scope="session")
def smollm2(smollm2_info: ModelInfo) -> loaded_model.Model:
    return loaded_model.load(smollm2_info, CPU, torch.float32)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """On tensors as small as these a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain_tiny(tiny_info: ModelInfo) -> Any:
    return oracle.plain_model(tiny_info.folder)


@pytest.fixture(scope="module")
def adapter_folders(tiny: loaded_model.Model, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three adapters of different ranks, on all layers."""
    folders = []
    for seed, rank in enumerate((4, 8, 3)):
        folder = tmp_path_factory.mktemp("adapters") / str(seed)
        made = randomise(Adapter(tiny, LoraSpec(rank=rank, seed=seed)), seed)
        checkpoint.save(made, folder, with_optimizer=False)
        folders.append(str(folder))
    return folders
