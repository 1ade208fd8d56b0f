"""Server-sent events over the one way to the service: opened like any request, then read event by event."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tinkex.client._calls.send import open_stream
from tinkex.client._http.transport import StreamedResponse
from tinkex.client._runtime.link import ServiceLink
from tinkex.wire import sse
from tinkex.wire.body import Body
from tinkex.wire.endpoints import Endpoint


async def open_event_stream(
    link: ServiceLink,
    endpoint: Endpoint,
    body: Body,
    *,
    key: str,
    attempt: int,
    bearer: str | None = None,
) -> StreamedResponse:
    """Send once and return the response when the first byte of its body is here; `close` it.

    Up to that byte nothing was handed to the caller: the request may be sent again. From then on it may not.
    """
    headers = {"accept": "text/event-stream"}
    response = await open_stream(link, endpoint, body, headers=headers, key=key, attempt=attempt, bearer=bearer)
    try:
        await response.wait_for_body()
    except BaseException:
        response.close()
        raise
    return response


async def read_events(response: StreamedResponse) -> AsyncIterator[sse.Event]:
    """Yield the events of a stream as they arrive."""
    decoder = sse.SSEDecoder()
    async for data in response.chunks():
        for event in decoder.feed(data):
            yield event
