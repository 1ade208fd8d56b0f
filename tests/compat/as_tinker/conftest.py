"""Installs the alias for one test and removes it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tinkex import as_tinker
from tinkex.testing import ScriptedService


@pytest.fixture
def tinker() -> Iterator[ModuleType]:
    """What a program gets from `import tinker`."""
    as_tinker.install()
    try:
        import tinker

        yield tinker
    finally:
        as_tinker.uninstall()


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with ScriptedService() as running:
        yield running


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = str(tmp_path_factory.mktemp("home"))
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, home)
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD", "TINKEX_CONFIG"):
        monkeypatch.delenv(name, raising=False)
