"""The fixtures, as another project's test suite would use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import http.client

import pytest


def ask(service):
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"))
    connection.request("POST", "/api/v1/client/config", b"{}")
    return connection.getresponse().status


def test_default(tinkex_service, tinkex_clock):
    tinkex_clock.advance(1)
    assert ask(tinkex_service) == 200


@pytest.mark.parametrize("tinkex_service", [{"dialect": "json"}], indirect=True)
def test_configured(tinkex_service):
    assert ask(tinkex_service) == 404
"""


@pytest.mark.slow
def test_another_project_gets_the_fixtures_by_naming_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tinkex.testing.pytest_plugin"]\n')
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60, check=False)
    assert "2 passed" in run.stdout, run.stdout + run.stderr
