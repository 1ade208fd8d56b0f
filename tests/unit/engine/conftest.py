"""Base models for the engine's tests, loaded once and kept in the checkout's `.cache`: the GGUF is fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.engine import oracle
from tinkex.engine.contract import ModelInfo
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
