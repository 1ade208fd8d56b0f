"""One server on the tiny model for all tests that do not hurt it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tinkex
from tests.service.live import LiveServer


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("live") / "data") as server:
        yield server


@pytest.fixture
def service(live: LiveServer) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=live.url, api_key="tml-test") as client:
        yield client
