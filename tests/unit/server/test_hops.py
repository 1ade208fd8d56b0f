"""Handing a request to another server: bytes there and back, connections kept, and every way in which that can end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, ParamSpec

import pytest

from tinkex.clock import REAL
from tinkex.server.cluster import hop
from tinkex.server.cluster.hop import HopFailed, Hops

P = ParamSpec("P")
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run


@contextlib.asynccontextmanager
async def other_node(serve: Serve) -> AsyncIterator[str]:
    """A server that does with each connection what the test says. Its address."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def lives() -> bool:
    return True


async def sent(hops: Hops, url: str, body: bytes = b"") -> tuple[int, bytes]:
    response = await hops.send(url, "POST", b"/internal/x?y=1", [(b"host", b"front"), (b"x-a", b"b")], body, lives)
    return response.status, b"".join([piece async for piece in response.pieces()])


@on_a_loop
async def test_requests_and_responses_pass_unchanged_on_one_connection() -> None:
    heads, connections = [], []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while True:
            heads.append(await head_of(reader))
            body = await reader.readexactly(int(heads[-1].split(b"content-length: ")[1].split(b"\r\n")[0]))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with other_node(echo) as url:
        hops = Hops(REAL)
        large = bytes(range(256)) * 4000
        for body in (b"", b"\0small", large):
            assert await sent(hops, url, body) == (200, body)
        hops.close()
    assert len(connections) == 1
    assert heads[0].startswith(b"POST /internal/x?y=1 HTTP/1.1\r\n") and b"\r\nx-a: b\r\n" in heads[0]
    assert heads[0].count(b"\r\nhost: ") == 1 and b"\r\nhost: 127.0.0.1:" in heads[0], "proxies reject a second one"


@on_a_loop
async def test_a_connection_that_was_closed_while_it_was_kept_is_replaced() -> None:
    count = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await head_of(reader)  # the next request comes, and the connection is closed without a response

    async with other_node(once) as url:
        hops = Hops(REAL)
        assert [await sent(hops, url) for _ in range(3)] == [(200, b"ok")] * 3
        hops.close()
    assert count == 3


@on_a_loop
async def test_a_stream_comes_piece_by_piece() -> None:
    may_go_on = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await may_go_on.wait()
        writer.write(b"6;x=y\r\nsecond\r\n0\r\n\r\n")
        await head_of(reader)

    async with other_node(stream) as url:
        hops = Hops(REAL)
        pieces = (await hops.send(url, "POST", b"/", [], b"", lives)).pieces()
        assert await anext(pieces) == b"first"
        may_go_on.set()
        assert [piece async for piece in pieces] == [b"second"]
        hops.close()


@on_a_loop
async def test_a_body_of_unknown_length_is_sent_as_it_comes() -> None:
    received = asyncio.Queue[bytes]()

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"transfer-encoding: chunked" in await head_of(reader)
        received.put_nowait(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async def body() -> AsyncIterator[bytes]:
        yield b"abc"
        yield b""
        yield b"d" * 20

    async with other_node(read) as url:
        hops = Hops(REAL)
        response = await hops.send(url, "POST", b"/", [], body(), lives)
        assert (response.status, [piece async for piece in response.pieces()]) == (204, [])
        hops.close()
    assert received.get_nowait() == b"3\r\nabc\r\n14\r\n" + b"d" * 20 + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nno length",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
    ],
)
@on_a_loop
async def test_a_response_that_is_not_whole_is_a_failure(content: bytes) -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(content)

    async with other_node(end) as url:
        hops = Hops(REAL)
        with pytest.raises(HopFailed):
            await sent(hops, url)
        hops.close()


@on_a_loop
async def test_a_node_that_is_silent_or_gone_is_a_failure_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen process accepts connections and takes bytes."""
    monkeypatch.setattr(hop, "LOOK_S", 0.05)
    looks = 0

    async def lives_for_a_while() -> bool:
        nonlocal looks
        looks += 1
        return looks < 3

    async def freeze(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    hops = Hops(REAL)
    async with other_node(freeze) as url:
        with pytest.raises(HopFailed, match="not renewed its lease"):
            await hops.send(url, "POST", b"/", [], b"", lives_for_a_while)
        assert looks == 3
    with pytest.raises(HopFailed, match="cannot be reached"):
        await sent(hops, url)


@on_a_loop
async def test_a_node_that_lives_may_take_long_to_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion that is not streamed is drawn first. After 60 s it was given up, and asked for again."""
    monkeypatch.setattr(hop, "LOOK_S", 0.02)

    async def think(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        await asyncio.sleep(0.2)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with other_node(think) as url:
        hops = Hops(REAL)
        assert await sent(hops, url) == (200, b"ok")
        hops.close()


@on_a_loop
async def test_a_body_that_comes_in_pieces_keeps_its_length() -> None:
    """A node with a quota rejects an upload whose size is not known."""
    seen: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend((await head_of(reader), await reader.readexactly(6)))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"abc", b"", b"def"):
            yield piece

    async with other_node(take) as url:
        hops = Hops(REAL)
        await hops.send(url, "POST", b"/", [(b"content-length", b"6")], pieces(), lives)
        hops.close()
    assert seen[1] == b"abcdef" and b"content-length: 6\r\n" in seen[0] and b"chunked" not in seen[0]
