"""Server-sent events as a response: early errors, late errors, comments, and cleanup."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from tinkex.server.http import event_stream
from tinkex.server.http.event_stream import open_event_stream

SCOPE: dict[str, Any] = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "POST", "path": "/", "headers": []}


class Events:
    """A generator of events whose steps a test scripts; it remembers that it was closed."""

    def __init__(self, *steps: bytes | Exception | asyncio.Event) -> None:
        self.steps, self.is_closed = steps, False

    async def run(self) -> AsyncGenerator[bytes, None]:
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.is_closed = True


def encode_error(error: Exception) -> bytes:
    return f"error {error}".encode()


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def body_of(
    events: Events,
    receive: Callable[[], Awaitable[Message]] = never,
    on_message: Callable[[str], None] = lambda kind: None,
) -> list[bytes]:
    chunks: list[bytes] = []

    async def send(message: Message) -> None:
        on_message(message["type"])
        if message["type"] == "http.response.body" and message["body"]:
            chunks.append(message["body"])

    response = await open_event_stream(events.run(), encode_error)
    await response(SCOPE, receive, send)
    return chunks


def test_all_events_are_sent_and_the_generator_is_closed() -> None:
    events = Events(b"a", b"b")
    assert asyncio.run(body_of(events)) == [b"a", b"b"]
    assert events.is_closed


def test_an_error_before_the_first_event_is_raised_and_can_become_a_status() -> None:
    events = Events(ValueError("full"))
    with pytest.raises(ValueError, match="full"):
        asyncio.run(body_of(events))
    assert events.is_closed


def test_a_later_error_is_the_last_event() -> None:
    assert asyncio.run(body_of(Events(b"a", ValueError("died"), b"b"))) == [b"a", b"error died"]


def test_an_error_after_the_first_wait_is_an_event_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "FIRST_EVENT_S", 0.0)

    async def run() -> list[bytes]:
        gate = asyncio.Event()
        # The error comes when the headers were sent, not before.
        return await body_of(Events(gate, ValueError("late")), on_message=lambda kind: gate.set())

    assert asyncio.run(run()) == [b"error late"]


def test_comments_are_sent_while_nothing_happens_and_no_event_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "FIRST_EVENT_S", 0.0)
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.005)

    async def run() -> list[bytes]:
        gate = asyncio.Event()

        def on_message(kind: str) -> None:
            if kind == "http.response.body":  # the first is a comment: the events wait for it
                gate.set()

        return await body_of(Events(gate, b"a", b"b"), on_message=on_message)

    *comments, first, second = asyncio.run(run())
    assert (first, second) == (b"a", b"b")
    assert comments and set(comments) == {b": keep-alive\n\n"}


def test_the_generator_is_closed_when_the_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it leaves in the middle or before the first byte."""
    monkeypatch.setattr(event_stream, "FIRST_EVENT_S", 0.0)

    async def run(events: Events) -> None:
        async def leave() -> Message:
            return {"type": "http.disconnect"}

        await asyncio.wait_for(body_of(events, leave), 5)

    async def scenario() -> None:
        for steps in ((b"a", asyncio.Event()), (asyncio.Event(),)):
            events = Events(*steps)
            await run(events)
            assert events.is_closed

    asyncio.run(scenario())


def test_nothing_comes_between_the_blocks_of_a_large_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment inside of an event would end it: it ends with an empty line."""
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.01)

    async def blocks() -> AsyncGenerator[bytes, None]:
        yield b"data: a"
        await asyncio.sleep(0.1)
        yield b"b\n\n"

    async def events() -> AsyncGenerator[event_stream.Event, None]:
        yield blocks()

    async def run() -> bytes:
        sent: list[bytes] = []

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))

        await (await open_event_stream(events(), encode_error))(SCOPE, never, send)
        return b"".join(sent)

    assert asyncio.run(run()) == b"data: ab\n\n"


def test_an_error_inside_of_an_event_ends_the_connection() -> None:
    async def blocks() -> AsyncGenerator[bytes, None]:
        yield b"data: a"
        raise ValueError("in the middle")

    async def events() -> AsyncGenerator[event_stream.Event, None]:
        yield blocks()

    async def run() -> list[bytes]:
        sent: list[bytes] = []

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))

        with pytest.raises((ValueError, ExceptionGroup)):
            await (await open_event_stream(events(), encode_error))(SCOPE, never, send)
        return sent

    assert b"".join(asyncio.run(run())) == b"data: a"
