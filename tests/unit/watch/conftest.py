"""A scripted service, a client of it, and one step of a loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tinkex
from tinkex.testing import ScriptedService

MODEL = "tinkex/tiny"
TEACHER = "tinkex/teacher"
PRICES = {MODEL: {"train": 1_000.0, "prefill": 100.0, "sample": 10_000.0}}
"""A batch of `batch()`, 12 tokens, costs 0.012 to train on."""


@pytest.fixture
def scripted() -> Iterator[ScriptedService]:
    with ScriptedService(base_models=[MODEL, TEACHER], gap_s=0.3) as running:
        yield running


@pytest.fixture
def service(scripted: ScriptedService) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=scripted.url, api_key="tml-progress", telemetry=False) as client:
        yield client


@pytest.fixture
def training(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4)


def batch(length: int = 3, size: int = 4) -> list[tinkex.Datum]:
    tokens = list(range(1, length + 1))
    inputs: dict[str, Any] = {"target_tokens": tokens, "weights": [1.0] * length}
    return [tinkex.Datum(tinkex.ModelInput.from_ints(tokens), inputs)] * size


def train(training: tinkex.TrainingClient, data: list[tinkex.Datum] | None = None) -> tinkex.APIFuture[Any]:
    """One step; nobody waits for it here."""
    training.forward_backward(batch() if data is None else data, "cross_entropy")
    return training.optim_step(tinkex.AdamParams(learning_rate=1e-2))
