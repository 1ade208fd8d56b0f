"""Fixtures for the test suites of other projects: `pytest_plugins = ["tinkex.testing.pytest_plugin"]`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tinkex.testing.clock import FakeClock
from tinkex.testing.service import ScriptedService


@pytest.fixture
def tinkex_service(request: pytest.FixtureRequest) -> Iterator[ScriptedService]:
    """A fresh `ScriptedService` per test.

    Its configuration may be given by a marker-free parametrisation:
    `@pytest.mark.parametrize("tinkex_service", [{"dialect": "json"}, {"dialect": "proto"}], indirect=True)`.
    """
    with ScriptedService(**getattr(request, "param", {})) as service:
        yield service


@pytest.fixture
def tinkex_clock() -> FakeClock:
    """A clock that stands still until the test turns it."""
    return FakeClock()
