"""Real HTTP against the scripted service: what a user's program sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex
from tinkex.testing import ScriptedService

MODEL = "tinkex/tiny"


@pytest.fixture(params=["proto", "json"])
def service(request: pytest.FixtureRequest) -> Iterator[ScriptedService]:
    """A service of each dialect."""
    with ScriptedService(dialect=request.param, base_models=[MODEL], gap_s=0.3) as running:
        yield running


@pytest.fixture
def proto_service() -> Iterator[ScriptedService]:
    with ScriptedService(dialect="proto", base_models=[MODEL], gap_s=0.3) as running:
        yield running


@pytest.fixture
def connect() -> Iterator[Callable[..., tinkex.ServiceClient]]:
    """Makes clients of a service and closes them; short retries unless the test says otherwise."""
    made: list[tinkex.ServiceClient] = []

    def make(service: ScriptedService, **options: Any) -> tinkex.ServiceClient:
        settings = {"telemetry": False, "unreachable_s": 20.0, "deadline_s": 60.0, **options}
        made.append(tinkex.ServiceClient(base_url=service.url, api_key=f"tml-{len(made)}-{id(service)}", **settings))
        return made[-1]

    yield make
    for client in made:
        client.close().exception(10)


@pytest.fixture
def training(service: ScriptedService, connect: Callable[..., tinkex.ServiceClient]) -> tinkex.TrainingClient:
    return connect(service).create_lora_training_client(MODEL, rank=8)


@pytest.fixture
def sampler(service: ScriptedService, connect: Callable[..., tinkex.ServiceClient]) -> tinkex.SamplingClient:
    return connect(service).create_sampling_client(base_model=MODEL)


def datum(length: int = 3, **inputs: Any) -> tinkex.Datum:
    tokens = list(range(1, length + 1))
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * length, **inputs},
    )


def step() -> tinkex.AdamParams:
    return tinkex.AdamParams(learning_rate=1e-3)


def prompt() -> tinkex.ModelInput:
    return tinkex.ModelInput.from_ints([5, 6, 7])
