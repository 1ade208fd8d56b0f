"""A model's reply to a conversation, word by word, from the service's OpenAI-compatible endpoint.

The service applies the model's chat template, so that no tokenizer is needed here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tinkex.client._calls.attempts import QueuedAttempts
from tinkex.client._calls.decode import decoded
from tinkex.client._calls.handshake import ready
from tinkex.client._calls.send import open_events, read_events
from tinkex.client._http.transport import StreamedResponse
from tinkex.client._runtime.link import ServiceLink, link_for
from tinkex.client._runtime.operation import Operation
from tinkex.client._runtime.pump import Pump
from tinkex.errors import APIResponseValidationError, RequestFailedError
from tinkex.settings import Config
from tinkex.types.coerce import Mismatch, coercer
from tinkex.wire import json_codec
from tinkex.wire.body import Body
from tinkex.wire.endpoints import Endpoint, Pool

CHAT = Endpoint("chat_completions", "POST", "/oai/api/v1/chat/completions", Pool.SAMPLE)
"""Where the hosted service has it; ours has it there too."""


class ChatDelta(NamedTuple):
    """Some more of the reply. The last one has no text and says why the reply ends: stop or length."""

    text: str
    finish_reason: str | None = None


def stream_chat(config: Config, body: dict[str, Any]) -> Iterator[ChatDelta]:
    """Yield the reply as it is written. Leaving early (Ctrl-C) stops it at the service too.

    `body` is that of OpenAI's chat completions: `model`, `messages`, `temperature` and so on.
    """
    link = link_for(config)
    operation = Operation("chat", link.clock.now())
    pump: Pump[ChatDelta] = Pump(link, operation, lambda put: _receive(link, operation, body, put))
    return iter(pump)


async def _receive(
    link: ServiceLink, operation: Operation, body: dict[str, Any], put: Callable[[ChatDelta], None]
) -> None:
    await ready(link)
    request = Body(json_codec.encode({**body, "stream": True}))
    key = link.idempotency_key()

    async def open_once(attempt: int) -> StreamedResponse:
        operation.attempts = attempt
        # The API key as OpenAI's clients send it; a short-lived token is only for our own endpoints.
        return await open_events(link, CHAT, request, key=key, attempt=attempt, bearer=link.auth.key)

    response = await QueuedAttempts(link, operation, CHAT.name).run(open_once)
    try:
        async for event in read_events(link, response):
            if event.data == "[DONE]":
                return
            for delta in await decoded(functools.partial(_deltas, event.data), len(event.data)):
                put(delta)
    finally:
        response.close()
    raise APIResponseValidationError(None, None, "The reply broke off before the service said it was done.")


_STR = coercer(str)


def _deltas(data: str) -> list[ChatDelta]:
    deltas = []
    chunk = json_codec.decode_answer(data.encode())
    if isinstance(chunk, dict) and chunk.get("error"):
        error = chunk["error"]
        raise RequestFailedError(f"{error.get('message') if isinstance(error, dict) else error!s:.10000}")
    try:
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                deltas.append(ChatDelta(_STR(text)))
            if choice.get("finish_reason"):
                deltas.append(ChatDelta("", _STR(choice["finish_reason"])))
    except (KeyError, TypeError, AttributeError, Mismatch):
        raise APIResponseValidationError(body=chunk, message=f"The stream brought no text: {data:.200}") from None
    return deltas
