"""Connections: how many an address may have, how long they may be silent, and that honest clients get in."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack

import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.unit.server.conftest import Served
from tinkex.server.http import protocol
from tinkex.server.http.event_stream import open_event_stream
from tinkex.server.http.protocol import network_of
from tinkex.server.limits.open_files import SPARE_FILES, fit_connections, raise_file_limit
from tinkex.server.upkeep.sparse_log import EVERY_S, SparseFilter
from tinkex.settings import ServeConfig
from tinkex.testing.clock import FakeClock

ASK = b"GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\n\r\n"
OTHER_ADDRESS = "127.0.0.2"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def connect(stack: ExitStack, served: Served, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    sock = stack.enter_context(
        socket.create_connection(("127.0.0.1", served.port), timeout=10, source_address=(source, 0))
    )
    sock.sendall(sent)
    return sock


def rest_of(sock: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    pieces = []
    try:
        while piece := sock.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def read_response(sock: socket.socket) -> bytes:
    """One response with a Content-Length; the connection stays open."""
    content = b""
    while b"\r\n\r\n" not in content:
        content += sock.recv(65536)
    head, _, body = content.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return head + b"\r\n\r\n" + body


def wait_until(is_so: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def rejections(served: Served, limit: str) -> float:
    value = served.service.metrics.registry.get_sample_value("tinkex_limit_rejections_total", {"limit": limit})
    assert value is not None
    return value


# ── Silence


def test_a_connection_that_never_sends_anything_is_closed(serve: Callable[..., Served], stack: ExitStack) -> None:
    """Before: `timeout_keep_alive` begins after a response only, so it stayed open for ever."""
    served = serve(head_timeout_s=0.2)
    assert rest_of(connect(stack, served)) == b""
    assert rejections(served, "head_timeout_s") == 0, "it asked for nothing that was rejected"


@pytest.mark.parametrize("sent", [b"POST /api", b"GET / HTTP/1.1\r\nhost: x\r\nx-half: "])
def test_half_a_head_is_answered_with_408_and_closed(
    serve: Callable[..., Served], stack: ExitStack, sent: bytes
) -> None:
    served = serve(head_timeout_s=0.2)
    content = rest_of(connect(stack, served, sent))
    assert content.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b"--head-timeout-s" in content
    assert rejections(served, "head_timeout_s") == 1


@pytest.mark.parametrize("sent", [b"\r\n", b"POST /api/v1/healthz HTTP/1.1\r\nhost:"])
def test_a_connection_that_turns_silent_after_a_response_is_closed(
    serve: Callable[..., Served], stack: ExitStack, sent: bytes
) -> None:
    """An empty line stops uvicorn's timer for idle connections and begins no request."""
    served = serve(head_timeout_s=0.2)
    sock = connect(stack, served, ASK)
    assert read_response(sock).startswith(b"HTTP/1.1 200")
    sock.sendall(sent)
    rest_of(sock)


def test_a_body_that_nobody_reads_any_more_does_not_keep_a_connection(
    serve: Callable[..., Served], stack: ExitStack
) -> None:
    served = serve(head_timeout_s=0.2)
    head = b"POST /api/v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    sock = connect(stack, served, head)
    assert read_response(sock).startswith(b"HTTP/1.1 40")
    sock.sendall(b"x")
    rest_of(sock)


def test_a_kept_connection_serves_many_requests_and_pipelined_ones(
    serve: Callable[..., Served], stack: ExitStack
) -> None:
    served = serve(head_timeout_s=5)
    sock = connect(stack, served)
    for _ in range(3):
        sock.sendall(ASK)
        assert read_response(sock).startswith(b"HTTP/1.1 200")
    sock.sendall(ASK * 2 + ASK.replace(b"host: x", b"host: x\r\nconnection: close"))
    assert rest_of(sock).count(b"HTTP/1.1 200") == 3


# ── Number


def test_silent_connections_lock_nobody_out(serve: Callable[..., Served], stack: ExitStack) -> None:
    """The oldest idle connection of the same address makes room; other addresses are not affected at all."""
    served = serve(max_connections_per_address=4, max_connections=8)
    elsewhere = connect(stack, served, ASK, OTHER_ADDRESS)
    assert read_response(elsewhere).startswith(b"HTTP/1.1 200")
    silent = [connect(stack, served) for _ in range(20)]
    assert served.ask("GET", "healthz").status == 200
    assert rest_of(silent[0]) == b""
    assert served.service.ledger.used("connections", "127.0.0.1") <= 4
    elsewhere.sendall(ASK)
    assert read_response(elsewhere).startswith(b"HTTP/1.1 200")


def test_connections_that_are_let_in_do_not_count_as_rejections(serve: Callable[..., Served], stack: ExitStack) -> None:
    """Before: each one for which an idle connection made room was counted as rejected."""
    served = serve(max_connections_per_address=4)
    silent = [connect(stack, served) for _ in range(6)]
    assert served.ask("GET", "healthz").status == 200
    assert rest_of(silent[0]) == b""
    assert rejections(served, "max_connections_per_address") == 0


def test_busy_connections_beyond_the_limit_are_503_and_the_next_gets_in_when_one_ends(
    serve: Callable[..., Served], stack: ExitStack
) -> None:
    served = serve(max_connections_per_address=2)
    head = b"POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n"
    busy = [connect(stack, served, head) for _ in range(2)]
    wait_until(lambda: served.service.ledger.used("connections", "127.0.0.1") == 2 and not idle_connections(served))
    content = rest_of(connect(stack, served, ASK))
    assert content.startswith(b"HTTP/1.1 503 Service Unavailable\r\n") and b"retry-after: 1" in content
    assert b"--max-connections-per-address" in content and rejections(served, "max_connections_per_address") == 1
    assert read_response(connect(stack, served, ASK, OTHER_ADDRESS)).startswith(b"HTTP/1.1 200")
    busy[0].sendall(b"{}")
    assert read_response(busy[0]).startswith(b"HTTP/1.1 200")
    assert served.ask("GET", "healthz").status == 200


def idle_connections(served: Served) -> int:
    connections: protocol.Connections = served.protocol.all_connections
    return sum(map(len, list(connections._idle.values())))


def test_what_a_connection_held_is_given_back(served: Served, stack: ExitStack) -> None:
    for sent in (b"", ASK, b"rubbish\r\n\r\n", b"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\n"):
        connect(stack, served, sent).close()
    assert served.ask("GET", "healthz").status == 200
    wait_until(lambda: not served.service.ledger.total("connections"))
    assert idle_connections(served) == 0


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("2001:db8:1:2:3::4", 5), "2001:db8:1:2::/64"),
        (("::ffff:10.0.0.1", 5), "10.0.0.1"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (None, ""),
    ],
)
def test_connections_count_for_what_one_customer_of_a_network_gets(peer: tuple[str, int] | None, network: str) -> None:
    assert network_of(peer) == network


# ── Responses that are not read


def test_a_response_that_is_never_read_does_not_keep_its_connection(
    serve: Callable[..., Served], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "WRITE_STALL_S", 0.2)
    served = serve()
    served.app.add_route("/large", lambda request: Response(bytes(20 << 20)))
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", served.port))
    sock.sendall(b"GET /large HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    wait_until(lambda: served.service.ledger.total("connections") == 1)
    wait_until(lambda: not served.service.ledger.total("connections"))


def test_a_stream_that_is_never_read_ends_with_its_connection(
    serve: Callable[..., Served], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "WRITE_STALL_S", 0.2)
    served, has_ended = serve(), threading.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"x" * 100_000
        finally:
            has_ended.set()

    async def stream(request: Request) -> Response:
        return await open_event_stream(events(), lambda error: b"")

    served.app.add_route("/stream", stream)
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", served.port))
    sock.sendall(b"GET /stream HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    assert has_ended.wait(10)
    wait_until(lambda: not served.service.ledger.total("connections"))


# ── Files and log


def test_connections_fit_into_the_files_that_can_be_open(caplog: pytest.LogCaptureFixture) -> None:
    config = ServeConfig(max_connections=500)
    assert fit_connections(config, None) is config
    assert fit_connections(config, 1000 + SPARE_FILES) is config and not caplog.records
    assert fit_connections(config, 256).max_connections == (256 - SPARE_FILES) // 2
    assert "ulimit -n" in caplog.text


def test_the_limit_of_open_files_is_raised_to_what_is_allowed() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert raise_file_limit() == min(hard if hard > 0 else 65_536, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_strangers_can_cause_is_logged_once_in_ten_seconds() -> None:
    clock = FakeClock()
    sparse = SparseFilter(("socket.accept()",), clock)

    def passes(text: str) -> str | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, None, None)
        return record.getMessage() if sparse.filter(record) else None

    flood = "socket.accept() out of system resource\nsocket: <...>"
    assert [passes(flood) for _ in range(1000)] == [flood, *[None] * 999]
    assert passes("another error") == "another error"
    clock.advance(EVERY_S)
    assert passes(flood) == f"{flood} (999 more since the last such line)"
