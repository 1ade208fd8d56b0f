"""The official clients and ours through every step of the flow, against a real service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat.conformance.environments import RELEASES
from tests.compat.conformance.matrix import MODELS, OURS, drive
from tests.integration.service.conftest import live as live
from tests.integration.service.live import LiveServer


@pytest.mark.slow
@pytest.mark.parametrize("client", ["0.36.0", OURS])
def test_every_step_passes_on_the_tiny_model(client: str, live: LiveServer) -> None:
    outcome = drive(client, live.url, MODELS[0])
    assert outcome.is_whole, outcome.output


@pytest.mark.full
@pytest.mark.parametrize("client", [*RELEASES, OURS])
def test_every_step_passes_on_smollm2(client: str, smollm2_server: LiveServer) -> None:
    outcome = drive(client, smollm2_server.url, MODELS[1])
    assert outcome.is_whole, outcome.output


@pytest.mark.full
@pytest.mark.parametrize("client", [release for release in RELEASES if release != "0.36.0"])
def test_every_step_passes_on_the_tiny_model_with_older_clients(client: str, live: LiveServer) -> None:
    outcome = drive(client, live.url, MODELS[0])
    assert outcome.is_whole, outcome.output


@pytest.fixture(scope="module")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("smollm2") / "data", models=(MODELS[1],)) as server:
        yield server
