"""Bodies in flight: how many bytes a tenant may have there, how slowly they come, and that all is given back."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest
import zstandard

from tests.unit.server.conftest import Served
from tests.unit.server.test_imports import ADAPTER, PLACE, Engine
from tinkex.errors import ValidationError
from tinkex.server.http.requests import ApiRequest
from tinkex.server.upkeep.adapter_files import INCOMING
from tinkex.wire.body import decompress, decompressed

ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789ab"
KB = 1024


@pytest.fixture
def count_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every byte, so that a test needs no megabytes."""
    monkeypatch.setattr("tinkex.server.http.requests.SMALL_BODY_BYTES", 0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def begin(
    stack: ExitStack, served: Served, size: int | None, sent: bytes = b"", key: str = BOB, path: str = ""
) -> socket.socket:
    """A POST whose body is still to come. Without a size it is chunked."""
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=10))
    length = "transfer-encoding: chunked" if size is None else f"content-length: {size}"
    path = path or "create_session"
    sock.sendall(f"POST /api/v1/{path} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: {key}\r\n{length}\r\n\r\n".encode())
    sock.sendall(sent)
    return sock


def status_of(sock: socket.socket) -> int:
    return int(sock.recv(65536).split()[1])


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The pieces of all bodies that the service has got."""
    pieces: list[bytes] = []
    stream = ApiRequest.stream

    async def watched(request: ApiRequest) -> AsyncIterator[bytes]:
        async for piece in stream(request):
            pieces.append(piece)
            yield piece

    monkeypatch.setattr(ApiRequest, "stream", watched)
    return pieces


def wait_for_piece(served: Served, arrived: list[bytes], number: int) -> None:
    """Until a handler has got so many pieces, and waits for the next."""
    wait_until(lambda: len(arrived) >= number)
    served.run(asyncio.sleep(0))


def in_flight(served: Served) -> int:
    return served.service.ledger.total("body_bytes")


def test_a_poll_is_served_while_the_uploads_of_its_tenant_are_over_the_budget(
    serve: Callable[..., Served], stack: ExitStack
) -> None:
    """Before: the 60 bytes of a poll were one too many. tinker 0.4.1 gives a result up for good after a 429."""
    served = serve(api_keys=(BOB,), max_tenant_body_bytes=100 * KB)
    served.session(tenant=served.run(served.service.access.tenant(BOB)))
    begin(stack, served, 100 * KB, b"{")
    wait_until(lambda: in_flight(served) == 100 * KB)
    assert served.ask("POST", "create_session", b" " * 65 * KB, key=BOB).status == 429
    poll = served.ask("POST", "retrieve_future", {"request_id": ""}, key=BOB)
    assert (poll.status, poll.json["code"]) == (400, "no_request_id"), "its body was read"
    assert served.ask("POST", "session_heartbeat", {"session_id": "s"}, key=BOB).status == 200


@pytest.mark.usefixtures("count_small")
def test_bytes_in_flight_are_bounded_per_tenant_and_another_tenant_is_served(
    serve: Callable[..., Served], stack: ExitStack
) -> None:
    """Before: 8 connections with 100 MB each were held in memory for as long as a byte came every minute."""
    served = serve(api_keys=(ALICE, BOB), max_tenant_body_bytes=100 * KB)
    slow = [begin(stack, served, 40 * KB, b"{") for _ in range(2)]
    wait_until(lambda: in_flight(served) == 80 * KB)
    answer = served.ask("POST", "create_session", b" " * 30 * KB, key=BOB)
    assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (429, "too_many_bytes", "1")
    assert "--max-tenant-body-bytes" in answer.json["detail"]
    assert served.ask("POST", "create_session", b" " * 30 * KB, key=ALICE).status == 200
    slow[0].sendall(b" " * (40 * KB - 2) + b"}")
    assert status_of(slow[0]) == 200
    assert served.ask("POST", "create_session", b" " * 30 * KB, key=BOB).status == 200


@pytest.mark.usefixtures("count_small")
def test_the_tenant_with_most_bytes_waits_when_the_service_has_too_many(
    serve: Callable[..., Served], stack: ExitStack
) -> None:
    served = serve(api_keys=(ALICE, BOB), max_all_body_bytes=100 * KB)
    begin(stack, served, 90 * KB)
    wait_until(lambda: in_flight(served) == 90 * KB)
    assert served.ask("POST", "create_session", b" " * 20 * KB, key=BOB).status == 429
    assert served.ask("POST", "create_session", b" " * 20 * KB, key=ALICE).status == 200


@pytest.mark.usefixtures("count_small")
@pytest.mark.parametrize("fold", [zstandard.compress, gzip.compress])
def test_bytes_count_after_decompression(serve: Callable[..., Served], fold: Callable[[bytes], bytes]) -> None:
    served = serve(max_tenant_body_bytes=100 * KB)
    encoding = {"content-encoding": "gzip" if fold is gzip.compress else "zstd"}
    assert served.ask("POST", "create_session", fold(b" " * 50 * KB), headers=encoding).status == 200
    answer = served.ask("POST", "create_session", fold(b" " * 101 * KB), headers=encoding)
    assert (answer.status, answer.json["code"]) == (429, "too_many_bytes")
    assert in_flight(served) == 0


@pytest.mark.usefixtures("count_small")
def test_a_chunked_body_counts_as_it_arrives(serve: Callable[..., Served], stack: ExitStack) -> None:
    served = serve(api_keys=(BOB,), max_tenant_body_bytes=100 * KB)
    sock = begin(stack, served, None)
    chunk = b"%x\r\n%b\r\n" % (60 * KB, b" " * 60 * KB)
    sock.sendall(chunk)
    wait_until(lambda: in_flight(served) == 60 * KB)
    sock.sendall(chunk)
    assert status_of(sock) == 429
    assert in_flight(served) == 0


@pytest.mark.usefixtures("count_small")
@pytest.mark.parametrize("end", ["disconnect", "bad JSON", "too large", "unknown encoding"])
def test_bytes_are_given_back_however_a_request_ends(serve: Callable[..., Served], stack: ExitStack, end: str) -> None:
    served = serve(api_keys=(BOB,), max_body_bytes=100 * KB)
    if end == "disconnect":
        sock = begin(stack, served, 50 * KB, b"{")
        wait_until(lambda: in_flight(served) == 50 * KB)
        sock.close()
    elif end == "bad JSON":
        assert served.ask("POST", "create_session", b"[" * 50 * KB, key=BOB).status == 400
    elif end == "too large":
        sock = begin(stack, served, None, b"%x\r\n%b\r\n" % (101 * KB, b" " * 101 * KB))
        assert status_of(sock) == 413
    else:
        headers = {"content-encoding": "rot13"}
        assert served.ask("POST", "create_session", b"x" * 50 * KB, key=BOB, headers=headers).status == 400
    wait_until(lambda: in_flight(served) == 0)


@pytest.mark.parametrize("path", ["create_session", PLACE])
def test_a_body_that_trickles_in_is_given_up_after_half_a_minute(
    serve: Callable[..., Served], stack: ExitStack, arrived: list[bytes], path: str
) -> None:
    """Before: a byte a minute was enough for ever."""
    served = serve(api_keys=(BOB,), min_body_rate=1000)
    sock = begin(stack, served, 100 * KB, b"{", path=path)
    wait_for_piece(served, arrived, 1)
    for number in range(2, 5):
        served.clock.advance(11)
        sock.sendall(b" ")
        wait_for_piece(served, arrived, number)
    assert status_of(sock) == 408
    wait_until(lambda: in_flight(served) == 0 == served.service.ledger.total("uploads"))


def test_a_body_that_is_fast_enough_may_take_long(
    serve: Callable[..., Served], stack: ExitStack, arrived: list[bytes]
) -> None:
    served = serve(api_keys=(BOB,), min_body_rate=1000)
    sock = begin(stack, served, 100 * KB, b"{" + b" " * (60 * KB - 1))
    wait_until(lambda: sum(map(len, arrived)) == 60 * KB)
    served.run(asyncio.sleep(0))
    served.clock.advance(50)  # every piece from here on finds more than 50,000 bytes, however the socket cuts them
    sock.sendall(b" " * (40 * KB - 1) + b"}")
    assert status_of(sock) == 200


# ── Uploads


def test_a_tenant_has_only_so_many_uploads_at_a_time(serve: Callable[..., Served], stack: ExitStack) -> None:
    """Before: any number of uploads, of 4 GB each."""
    served = serve(api_keys=(ALICE, BOB), max_uploads=2)
    Engine(served)
    under_way = [begin(stack, served, len(ADAPTER), ADAPTER[:100], path=PLACE) for _ in range(2)]
    wait_until(lambda: served.service.ledger.total("uploads") == 2)
    answer = served.ask("POST", PLACE, ADAPTER, key=BOB)
    assert (answer.status, answer.json["code"]) == (429, "too_many_uploads")
    assert "--max-uploads" in answer.json["detail"]
    assert served.ask("POST", PLACE, ADAPTER, key=ALICE).status == 200
    under_way[0].sendall(ADAPTER[100:])
    assert status_of(under_way[0]) == 200
    under_way[1].close()
    wait_until(lambda: not served.service.ledger.total("uploads"))
    assert served.ask("POST", PLACE, ADAPTER, key=BOB).status == 200
    assert list((served.config.data_dir / INCOMING).iterdir()) == []


def test_an_upload_that_stops_half_way_is_given_up(
    serve: Callable[..., Served], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: 5 of 5 uploads were open after 75 s of silence."""
    monkeypatch.setattr("tinkex.server.http.requests.BODY_IDLE_S", 0.2)
    served = serve(api_keys=(BOB,))
    sock = begin(stack, served, len(ADAPTER), ADAPTER[:100], path=PLACE)
    assert status_of(sock) == 408
    assert list((served.config.data_dir / INCOMING).iterdir()) == []


# ── Decompression in pieces


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_a_body_unfolds_in_pieces_to_the_same_bytes(encoding: str) -> None:
    content = random.Random(1).randbytes(3 << 20) * 3
    folded = gzip.compress(content, 1) if encoding == "gzip" else zstandard.compress(content)
    pieces = list(decompressed(folded, encoding))
    assert b"".join(pieces) == content == decompress(folded, encoding)
    assert len(pieces) > 1
    with pytest.raises(ValidationError, match="breaks off"):
        decompress(folded[:-10], encoding)
    with pytest.raises(ValidationError, match="unfolds to more than"):
        decompress(folded, encoding, len(content) - 1)
    assert decompress(folded, encoding, len(content)) == content


def test_what_a_bomb_becomes_is_handed_on_before_it_is_rejected() -> None:
    """Before: 32 MiB that one step of a zstd bomb makes were charged as 4, and 200 bombs became 6 GB unnoticed."""
    made = 0
    with pytest.raises(ValidationError, match="unfolds to more"):
        for piece in decompressed(zstandard.compress(bytes(100 << 20)), "zstd", 1 << 20):
            made += len(piece)
    assert made > 1 << 20
