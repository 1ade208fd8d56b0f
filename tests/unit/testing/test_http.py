"""The server's HTTP, on raw sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinkex.testing import Hang, ScriptedService

from .http_client import Client

HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n"
OK = b'{"status":"ok"}'


@pytest.fixture
def wire(service: ScriptedService) -> Iterator[socket.socket]:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        yield sock


def read_until(sock: socket.socket, ending: bytes) -> bytes:
    got = b""
    while not got.endswith(ending):
        piece = sock.recv(65536)
        if not piece:
            break
        got += piece
    return got


def test_a_request_may_arrive_byte_by_byte(wire: socket.socket) -> None:
    for index in range(len(HEALTH)):
        wire.sendall(HEALTH[index : index + 1])
    assert read_until(wire, OK).startswith(b"HTTP/1.1 200 OK\r\n")


def test_one_connection_serves_many_requests(wire: socket.socket, service: ScriptedService) -> None:
    for _ in range(3):
        wire.sendall(HEALTH)
        assert read_until(wire, OK).endswith(OK)
    assert service.connections == service.peak_connections == service.accepted_connections == 1
    assert [request.connection for request in service.requests] == [1, 1, 1]


def test_requests_sent_ahead_are_answered_in_order(wire: socket.socket, service: ScriptedService) -> None:
    wire.sendall(HEALTH + b"GET /nowhere HTTP/1.1\r\n\r\n" + HEALTH)
    got = read_until(wire, OK)
    while got.count(b"HTTP/1.1") < 3:
        got += read_until(wire, OK)
    assert [part[:3] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


def test_a_chunked_body_is_read_to_its_end(wire: socket.socket, service: ScriptedService) -> None:
    head = b"POST /api/v1/telemetry HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire.sendall(head + b'4;x=y\r\n{"a"\r\n3\r\n:1}\r\n0\r\nTrailer: t\r\n\r\n' + HEALTH)
    got = read_until(wire, OK)
    assert b"accepted" in got and service.telemetry == [{"a": 1}]


def test_a_client_that_waits_for_leave_to_send_gets_it(wire: socket.socket) -> None:
    wire.sendall(b"POST /api/v1/telemetry HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert read_until(wire, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.sendall(b"{}")
    assert b"accepted" in read_until(wire, b"}")


def test_connection_close_is_honoured(wire: socket.socket) -> None:
    wire.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
    read_until(wire, OK)
    assert wire.recv(1) == b""


def test_nonsense_is_answered_400_and_closed(wire: socket.socket) -> None:
    wire.sendall(b"nonsense\r\n\r\n")
    assert read_until(wire, b"never").startswith(b"HTTP/1.1 400")


def test_every_answer_has_a_content_length(client: Client) -> None:
    for got in (
        client.get("healthz"),
        client.get("nowhere"),
        client.post("get_info", {"model_id": "?"}),
        client.post("get_info"),
    ):
        assert int(got.headers["content-length"]) == len(got.body) > 0
    assert got.status == 422


def test_a_path_before_the_api_is_accepted(client: Client, service: ScriptedService) -> None:
    assert client.ask("GET", "/some/prefix/api/v1/healthz").json == {"status": "ok"}
    assert service.requests[-1].endpoint == "healthz"


def test_two_thousand_connections_are_served_at_once(service: ScriptedService) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    socks = [socket.create_connection((host, int(port)), timeout=20) for _ in range(2000)]
    try:
        for sock in socks:
            sock.sendall(HEALTH)
        assert all(read_until(sock, OK).endswith(OK) for sock in socks)
        assert service.peak_connections == 2000
    finally:
        for sock in socks:
            sock.close()


def test_requests_are_recorded_as_they_came(client: Client, service: ScriptedService) -> None:
    client.post("telemetry", {"events": []}, **{"X-API-Key": "tml-k"})
    seen = service.requests_to("telemetry")[0]
    assert (seen.method, seen.path, seen.status) == ("POST", "/api/v1/telemetry", 200)
    assert seen.headers["x-api-key"] == "tml-k" and seen.json == seen.summary == {"events": []}


def test_a_bug_in_the_service_is_a_500_not_a_hang(client: Client, service: ScriptedService) -> None:
    service.script.on("healthz", where=lambda request: bool(1 // 0), do=Hang())
    assert client.get("healthz").json["code"] == "bug"


def test_threads_share_the_service(service: ScriptedService) -> None:
    def ask(_: int) -> str:
        bare = Client(service)
        try:
            return bare.session()
        finally:
            bare.close()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(64)))) == 64 == len(service.sessions)
