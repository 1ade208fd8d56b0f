"""HTTP/1.1 and HTTP/2 on arbitrary bytes: however a response is cut, it reads the same; bad bytes never hang."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinkex
from tinkex.client._http.exchange import ConnectionLost, Exchange, HTTPRequest, ResponseTooLarge
from tinkex.client._http.http1 import Http1
from tinkex.client._http.http2 import Http2

REQUEST = HTTPRequest("GET", "https", "service.example", "/", {}, b"")
Connection = Http1 | Http2


class Sink:
    """A transport that keeps what is written and counts what is asked of it."""

    def __init__(self) -> None:
        self.written = b""
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True

    def take(self) -> bytes:
        data, self.written = self.written, b""
        return data


class Outcome(NamedTuple):
    """What a caller gets: a response, or an error."""

    status: int
    headers: dict[str, str]
    body: bytes
    error: str
    is_reusable: bool


def http1(pieces: list[bytes], *, ends: bool = True) -> Outcome:
    """Feed a connection these pieces, as the socket might deliver them, and close it if `ends`."""

    def talk(connection: Any) -> None:
        for piece in pieces:
            if not connection.is_closed:
                connection.data_received(piece)
        is_reusable.append(not connection.is_closed)
        if ends and not connection.is_closed:
            connection.eof_received()
            connection.connection_lost(None)

    is_reusable: list[bool] = []
    exchange = asyncio.run(_exchange(Http1, talk))
    return Outcome(exchange.status, exchange.headers, exchange.content(), str(exchange.error or ""), is_reusable[0])


async def _exchange(kind: Callable[[asyncio.AbstractEventLoop], Connection], talk: Callable[[Any], None]) -> Exchange:
    loop = asyncio.get_running_loop()
    connection = kind(loop)
    connection.connection_made(Sink())  # type: ignore[arg-type]
    exchange = Exchange(loop, False)
    connection.start(REQUEST, exchange)
    talk(connection)
    assert exchange.ended.done(), "the caller would wait for ever"
    return exchange


def cut(data: bytes, borders: list[int]) -> list[bytes]:
    """The same bytes in pieces, cut at these positions."""
    positions = sorted({border % (len(data) + 1) for border in borders} | {0, len(data)})
    return [data[start:stop] for start, stop in itertools.pairwise(positions)]


def chunked(body: bytes, sizes: list[int]) -> bytes:
    parts, rest = [], body
    for size in sizes:
        part, rest = rest[:size], rest[size:]
        if part:
            parts.append(part)
    parts += [rest] if rest else []
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


names = st.text("abcxyz-", min_size=1, max_size=8).map("x-{}".format)
values = st.text([chr(code) for code in range(0x21, 0x7F)], min_size=1, max_size=20)
heads = st.dictionaries(names, values, max_size=4)
borders = st.lists(st.integers(0, 1 << 16), max_size=12)


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(200, 599).filter(lambda status: status not in (204, 304)), heads, st.binary(max_size=300), borders)
def test_a_response_with_a_length_reads_the_same_however_it_is_cut(
    status: int, headers: dict[str, str], body: bytes, borders: list[int]
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    data = f"HTTP/1.1 {status} Whatever\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body
    outcome = http1(cut(data, borders))
    assert outcome == (status, {**headers, "content-length": str(len(body))}, body, "", True)


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(1, 50), max_size=8), borders)
def test_a_chunked_response_reads_the_same_however_it_is_cut(body: bytes, sizes: list[int], borders: list[int]) -> None:
    data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(body, sizes)
    assert http1(cut(data, borders)) == (200, {"transfer-encoding": "chunked"}, body, "", True)


@settings(deadline=None)
@given(st.binary(max_size=300), borders)
def test_a_response_without_a_length_ends_with_its_connection(body: bytes, borders: list[int]) -> None:
    outcome = http1(cut(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + body, borders))
    assert (outcome.status, outcome.body, outcome.error) == (200, body, "")


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data(), borders)
def test_a_response_that_breaks_off_is_an_error_wherever_it_does(
    body: bytes, data: st.DataObject, borders: list[int]
) -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    short = whole[: data.draw(st.integers(0, len(whole) - 1))]
    outcome = http1(cut(short, borders))
    assert outcome.error.startswith("connection lost")


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_bytes_that_are_not_http_end_the_exchange(pieces: list[bytes]) -> None:
    outcome = http1(pieces)
    assert outcome.error or outcome.status  # `_exchange` has seen that the caller does not wait for ever


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=100), borders)
def test_bytes_behind_a_response_close_the_connection(surplus: bytes, borders: list[int]) -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    outcome = http1([*cut(whole, borders), surplus], ends=False)
    assert (outcome.status, outcome.body, outcome.error, outcome.is_reusable) == (200, b"{}", "", False)


# -- HTTP/2 ----------------------------------------------------------------------------------------------------------


def http2_response(body: bytes) -> bytes:
    """All bytes of a service that responds to the first stream."""
    service = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
    service.initiate_connection()

    sent: list[bytes] = []

    def record(connection: Any) -> None:
        service.receive_data(connection._transport.take())
        service.send_headers(1, [(":status", "200"), ("x-note", "yes")])
        service.send_data(1, body, end_stream=True)
        sent.append(service.data_to_send())
        connection.data_received(sent[0])

    asyncio.run(_exchange(Http2, record))
    return sent[0]


@settings(deadline=None)
@given(st.binary(max_size=300), borders)
def test_an_http2_response_reads_the_same_however_it_is_cut(body: bytes, borders: list[int]) -> None:
    def talk(connection: Any) -> None:
        for piece in cut(http2_bytes, borders):
            connection.data_received(piece)

    http2_bytes = http2_response(body)
    exchange = asyncio.run(_exchange(Http2, talk))
    assert (exchange.status, exchange.headers, exchange.content()) == (200, {"x-note": "yes"}, body)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=100), st.integers(0, 1 << 16))
def test_an_http2_response_with_damaged_bytes_never_hangs(damage: bytes, position: int) -> None:
    data = http2_response(b"x" * 50)
    position %= len(data)

    def talk(connection: Any) -> None:
        connection.data_received(data[:position] + damage + data[position + len(damage) :])
        if not connection.is_closed:
            connection.connection_lost(None)

    exchange = asyncio.run(_exchange(Http2, talk))
    assert exchange.error is None or isinstance(exchange.error, ConnectionLost)


def test_a_body_in_pieces_of_two_bytes_counts_as_what_it_costs() -> None:
    """A piece of two bytes takes forty times as much: a gigabyte of them would be 20 in memory."""
    loop = asyncio.new_event_loop()
    exchange = Exchange(loop, False, limit_bytes=66_000)
    for _ in range(1000):
        exchange.feed(b"xy")
    with pytest.raises(ResponseTooLarge, match="66,000 bytes"):
        exchange.feed(b"xy")
    loop.close()


def test_a_switch_to_another_protocol_ends_the_exchange() -> None:
    outcome = http1([b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"])
    assert "not HTTP" in outcome.error


def http2_exchange(respond: Callable[[h2.connection.H2Connection], None], limit_bytes: int = 1000) -> Exchange:
    """The first of two exchanges on one connection, after a service has responded to it; the second must go on."""

    async def main() -> Exchange:
        loop, sink = asyncio.get_running_loop(), Sink()
        client = Http2(loop)
        client.connection_made(sink)  # type: ignore[arg-type]
        config = h2.config.H2Configuration(client_side=False, validate_outbound_headers=False)
        service = h2.connection.H2Connection(config)
        service.initiate_connection()
        first, second = Exchange(loop, False, limit_bytes), Exchange(loop, False)
        client.start(REQUEST, first)
        client.start(REQUEST, second)
        service.receive_data(sink.take())
        respond(service)
        service.send_headers(3, [(":status", "200")], end_stream=True)
        client.data_received(service.data_to_send())
        assert first.ended.done() and not client.is_closed
        assert second.status == 200 and second.error is None
        return first

    return asyncio.run(main())


def test_an_http2_body_beyond_the_limit_is_reset_and_the_other_exchanges_go_on() -> None:
    def endless(service: h2.connection.H2Connection) -> None:
        service.send_headers(1, [(":status", "200")])
        for _ in range(3):
            service.send_data(1, b"x" * 500)

    def announced(service: h2.connection.H2Connection) -> None:
        service.send_headers(1, [(":status", "200"), ("content-length", "1099511627776")])

    for respond in (endless, announced):
        assert isinstance(http2_exchange(respond).error, ResponseTooLarge)


def test_an_http2_status_that_is_no_number_ends_the_exchange() -> None:
    def respond(service: h2.connection.H2Connection) -> None:
        service.send_headers(1, [(":status", "2OO")])

    assert isinstance(http2_exchange(respond).error, ConnectionLost)


def test_a_service_that_shrinks_its_window_still_gets_the_whole_body() -> None:
    async def main() -> None:
        loop, sink = asyncio.get_running_loop(), Sink()
        client = Http2(loop)
        client.connection_made(sink)  # type: ignore[arg-type]
        service = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        service.initiate_connection()
        got = b""

        def turn() -> None:
            nonlocal got
            for event in service.receive_data(sink.take()):
                if isinstance(event, h2.events.DataReceived):
                    got += event.data
            client.data_received(service.data_to_send())

        turn()
        body = bytes(range(256)) * 1000
        client.start(HTTPRequest("POST", "https", "host", "/", {}, body), Exchange(loop, False))
        turn()
        service.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 100})
        turn()  # 65,535 bytes are on their way: the window is far below zero now
        turn()
        service.increment_flow_control_window(1 << 20)
        service.increment_flow_control_window(1 << 20, 1)
        turn()
        turn()
        assert got == body

    asyncio.run(main())


def test_a_header_that_cannot_be_sent_is_refused_on_either_version_of_http() -> None:
    for value in ("two\r\nlines", "日本"):
        with pytest.raises(tinkex.ValidationError, match="x-note"):
            HTTPRequest("GET", "https", "host", "/", {"x-note": value}, b"").check()
