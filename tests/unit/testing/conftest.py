"""A service and a bare client, of either dialect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tinkex.testing import ScriptedService

from .http_client import Client


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with ScriptedService(dialect="proto", hold_s=0.05, gap_s=0.05) as running:
        yield running


@pytest.fixture
def old_service() -> Iterator[ScriptedService]:
    with ScriptedService(dialect="json", hold_s=0.05, gap_s=0.05) as running:
        yield running


@pytest.fixture(params=["proto", "json"])
def any_service(request: pytest.FixtureRequest) -> Iterator[ScriptedService]:
    with ScriptedService(dialect=request.param, hold_s=0.05, gap_s=0.05) as running:
        yield running


@pytest.fixture
def client(service: ScriptedService) -> Iterator[Client]:
    bare = Client(service)
    yield bare
    bare.close()
