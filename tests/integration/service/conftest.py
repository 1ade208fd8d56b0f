"""One server on the tiny model for all tests that do not hurt it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tinkex
from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Raw

ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789ab"


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("live") / "data") as server:
        yield server


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server with a key for Alice and one for Bob, and a small limit for bodies."""
    flags = ("--api-key", ALICE, "--api-key", BOB, "--max-body-bytes", "1000000")
    with LiveServer(tmp_path_factory.mktemp("keyed") / "data", *flags) as server:
        yield server


@pytest.fixture(scope="session")
def alice(keyed: LiveServer) -> Raw:
    return Raw(keyed, ALICE)


@pytest.fixture(scope="session")
def bob(keyed: LiveServer) -> Raw:
    return Raw(keyed, BOB)


@pytest.fixture
def service(live: LiveServer) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=live.url, api_key="tml-test") as client:
        yield client
