"""A model's answer to a conversation, word by word, from the service's OpenAI-compatible endpoint.

The service applies the model's chat template, so that no tokenizer is needed here.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, NamedTuple

from tinkex.client._calls.call import error_of
from tinkex.client._runtime.link import Connection
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIResponseValidationError, RequestFailedError
from tinkex.wire import json_codec, sse
from tinkex.wire.endpoints import Endpoint, Pool

CHAT = Endpoint("chat_completions", "POST", "/oai/api/v1/chat/completions", Pool.SAMPLE)
"""Where the hosted service has it; ours answers there too."""
LOOK_S = 0.1
"""How soon Ctrl-C is noticed where a wait for a queue cannot be interrupted (Windows)."""


class Piece(NamedTuple):
    """Some more of the answer. The last one has no text and says why the answer ends: stop or length."""

    text: str
    finish_reason: str | None = None


def stream(connection: Connection, body: dict[str, Any]) -> Iterator[Piece]:
    """The answer as it is written. Whoever leaves early (Ctrl-C) has it stopped at the service too."""
    arrived: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    operation = Operation("chat", connection.clock.now())
    future = connection.run(operation, lambda: _receive(connection, body, arrived))
    try:
        while not (future.done() and arrived.empty()):
            try:
                yield arrived.get(timeout=LOOK_S)
            except queue.Empty:
                continue
        future.result()  # raises what ended it
    finally:
        future.cancel()


async def _receive(connection: Connection, body: dict[str, Any], arrived: queue.SimpleQueue[Piece]) -> None:
    await connection.ready()
    headers = {
        **connection.base_headers,
        "authorization": f"Bearer {connection.auth.key}",  # as OpenAI's clients send it
        "content-type": "application/json",
        "accept": "text/event-stream",
    }
    url = f"{connection.config.base_url}{CHAT.path}"
    content = json_codec.encode({**body, "stream": True})
    async with connection.transport.open(
        CHAT.pool, CHAT.method, url, headers, content, connection.config.timeout_s
    ) as answer:
        if answer.status >= 400:
            raise error_of(connection, await answer.whole(), CHAT)
        decoder = sse.SSEDecoder()
        async for data in answer.chunks():
            for event in decoder.feed(data):
                if event.data == "[DONE]":
                    return
                for piece in _pieces(event.data):
                    arrived.put(piece)
    raise APIResponseValidationError(None, None, "The answer broke off before the service said it was done.")


def _pieces(data: str) -> Iterator[Piece]:
    found = json_codec.decode_answer(data.encode())
    if isinstance(found, dict) and found.get("error"):
        error = found["error"]
        raise RequestFailedError(str(error.get("message") if isinstance(error, dict) else error))
    try:
        for choice in found["choices"]:
            if text := choice["delta"].get("content"):
                yield Piece(text)
            if choice.get("finish_reason"):
                yield Piece("", choice["finish_reason"])
    except (KeyError, TypeError, AttributeError):
        raise APIResponseValidationError(body=found, message=f"The stream brought no text: {data:.200}") from None
