"""Strangers who only open connections: a real server with few files goes on serving, and its log stays small."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.service.live import LiveServer

pytestmark = pytest.mark.slow

FILES = 256


@pytest.fixture
def small(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path / "data", "--head-timeout-s", "2", max_files=FILES)
    with server:
        yield server


def ask(server: LiveServer, source: str) -> float:
    """Ask for the list of sessions from an address of this machine; the seconds that it took."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5, source_address=(source, 0))
    try:
        connection.request("GET", "/api/v1/sessions")
        assert connection.getresponse().status == 200
    finally:
        connection.close()
    return time.monotonic() - began


@pytest.mark.timing
def test_idle_connections_are_closed_lock_nobody_out_and_do_not_flood_the_log(small: LiveServer) -> None:
    """Before: with 400 silent connections healthy clients timed out for ever, and the log grew by 2.7 MB/s."""
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", small.port), timeout=10)) for _ in range(400)
        ]
        for source in ("127.0.0.1", "127.0.0.2"):
            assert max(ask(small, source) for _ in range(5)) < 1, small.log()[-2000:]
        for sock in silent:
            assert not sock.recv(100)  # closed
        assert ask(small, "127.0.0.1") < 1
    assert len(small.log()) < 10_000, small.log()[-2000:]
    assert "at most 96 connections (ulimit -n)" in small.log()
    assert "out of system resource" not in small.log()  # it means that nothing is accepted for a second
