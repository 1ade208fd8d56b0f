"""The official clients and ours through every step of the flow, against a real service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.conformance.environments import RELEASES
from tests.compat.conformance.matrix import FLOW, MODELS, OURS, drive
from tests.integration.service.conftest import live as live
from tests.integration.service.live import LiveServer

SHARED = Path(__file__).parents[4] / "shared" / "conformance" / "official_flow.py"


@pytest.mark.slow
@pytest.mark.parametrize("client", ["0.36.0", OURS])
def test_every_step_passes_on_the_tiny_model(client: str, live: LiveServer) -> None:
    found = drive(client, live.url, MODELS[0])
    assert found.is_whole, found.output


@pytest.mark.full
@pytest.mark.parametrize("client", [*RELEASES, OURS])
def test_every_step_passes_on_smollm2(client: str, smollm2_server: LiveServer) -> None:
    found = drive(client, smollm2_server.url, MODELS[1])
    assert found.is_whole, found.output


@pytest.mark.full
@pytest.mark.parametrize("client", [release for release in RELEASES if release != "0.36.0"])
def test_every_step_passes_on_the_tiny_model_with_older_clients(client: str, live: LiveServer) -> None:
    found = drive(client, live.url, MODELS[0])
    assert found.is_whole, found.output


@pytest.fixture(scope="module")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with LiveServer(tmp_path_factory.mktemp("smollm2") / "data", models=(MODELS[1],)) as server:
        yield server


def test_the_flow_is_the_shared_one() -> None:
    assert not SHARED.exists() or FLOW.read_text() == SHARED.read_text()
