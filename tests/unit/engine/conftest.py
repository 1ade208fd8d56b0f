"""Base models for the engine's tests, loaded once and kept in the checkout's `.cache`: the GGUF is fetched once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import oracle
from tests.unit.engine.oracle import randomise
from tinkex.engine.adapters import checkpoint
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.contract import LoraSpec, ModelInfo
from tinkex.engine.models import hub, loaded_model, registry

CACHE = Path(__file__).parents[3] / ".cache"
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

    def unreachable(name: str, progress: object) -> Path:
        raise hub.HubUnreachable("tests do not ask it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "find_cached", lambda name: None)
        patch.setattr(hub, "download", unreachable)
        return registry.resolve("smollm2-135m", CACHE)


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
