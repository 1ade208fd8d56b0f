"""`SampleStream`: tokens as the service makes them, over server-sent events. Read once, with `for` or `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from tinkex.client._calls.call import error_of
from tinkex.client._calls.sample_call import Sample
from tinkex.client._runtime import tracing
from tinkex.client._runtime.link import Connection
from tinkex.client._runtime.loop import on_own_loop
from tinkex.client._runtime.operation import Operation
from tinkex.client.future import APIFuture
from tinkex.errors import (
    APIResponseValidationError,
    ClosedError,
    RequestFailedError,
    StreamAlreadyConsumed,
    WrongThread,
)
from tinkex.types.inputs import ModelInput
from tinkex.types.sampling import SampleResponse, SamplingParams
from tinkex.wire import endpoints, json_codec, sse

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient


class StreamChunk(NamedTuple):
    """Some tokens of one of the samples."""

    sample: int
    """Which of the samples, from 0."""
    tokens: list[int]
    logprobs: list[float] | None
    stop_reason: str | None = None
    """Set in the last chunk of a sample."""


class SampleStream:
    """An iterator of `StreamChunk`; afterwards `.response` is the whole `SampleResponse`."""

    def __init__(self, client: SamplingClient, prompt: ModelInput, num_samples: int, params: SamplingParams) -> None:
        self._client = client
        self._request = Sample(prompt, num_samples, params)
        self._is_taken = False
        self.response: SampleResponse | None = None

    def __iter__(self) -> Iterator[StreamChunk]:
        if on_own_loop():
            raise WrongThread("A stream cannot be read on the SDK's own loop thread.")
        source = self._open()

        def steps() -> Iterator[StreamChunk]:
            connection = self._client._session.connect()
            step: APIFuture[StreamChunk | None] | None = None
            try:
                while True:
                    step = connection.run(self._step(), lambda: _next(source))
                    chunk = step.result()
                    if chunk is None:
                        return
                    yield chunk
            finally:
                if step is not None:
                    step.cancel()  # who leaves while the next token is awaited (Ctrl-C) leaves it inside the generator
                connection.loop.post(lambda: connection.loop.spawn(_close(source)))

        return steps()

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        source = self._open()

        async def steps() -> AsyncIterator[StreamChunk]:
            connection = self._client._session.connect()
            step: APIFuture[StreamChunk | None] | None = None
            try:
                while True:
                    step = connection.run(self._step(), lambda: _next(source))
                    chunk = await step
                    if chunk is None:
                        return
                    yield chunk
            finally:
                if step is not None:
                    step.cancel()  # who leaves while the next token is awaited (Ctrl-C) leaves it inside the generator
                connection.loop.post(lambda: connection.loop.spawn(_close(source)))

        return steps()

    def _operation(self) -> Operation:
        session = self._client._session
        model_id = self._client._sampling_session_id
        return Operation("stream", session.connect().clock.now(), model_id=model_id, session=session)

    def _step(self) -> Operation:
        step = self._operation()
        step.is_part = True
        return step

    def _open(self) -> Any:
        if self._is_taken:
            raise StreamAlreadyConsumed("This stream was read already. Call stream() again for another sample.")
        self._is_taken = True
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[StreamChunk]:
        """The whole stream as one operation, however many steps read it."""
        connection = self._client._session.connect()
        operation = self._operation()
        connection.begin(operation)
        error: BaseException | None = None
        try:
            async with aclosing(self._received(connection, operation)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except asyncio.CancelledError:
            error = ClosedError("the stream was given up")
            raise
        except Exception as problem:
            error = problem
            raise
        finally:
            connection.end(operation, error)

    async def _received(self, connection: Connection, operation: Operation) -> AsyncGenerator[StreamChunk, None]:
        dialect = await connection.ready()
        if not connection.extensions.get("stream"):
            wanted = self._request
            self.response = await self._client.sample(wanted.prompt, wanted.num_samples, wanted.params)
            for index, sequence in enumerate(self.response.sequences):
                yield StreamChunk(index, sequence.tokens, sequence.logprobs, sequence.stop_reason)
            return
        seq_id = self._client._next_seq_id()
        if seq_id is None:
            seq_id = await self._client._join(connection, operation)
        operation.seq_id = seq_id
        operation.usage = self._client._usage(self._request.prompt)
        connection.announce(operation)
        body = self._request.body(self._client._sampling_session_id, seq_id, dialect)
        headers = {
            **connection.base_headers,
            "x-api-key": connection.auth.header,
            "content-type": body.content_type,
            "accept": "text/event-stream",
        }
        tracing.inject(headers)
        url = f"{connection.config.base_url}{endpoints.SAMPLE_STREAM.path}"
        pool = endpoints.SAMPLE_STREAM.pool
        timeout_s = connection.config.timeout_s
        async with connection.transport.open(pool, "POST", url, headers, body.content, timeout_s) as answer:
            if answer.status >= 400:
                raise error_of(connection, await answer.whole(), endpoints.SAMPLE_STREAM)
            decoder = sse.SSEDecoder()
            async for data in answer.chunks():
                for event in decoder.feed(data):
                    if event.event == "token":
                        yield _token(event.data)
                    elif event.event == "done":
                        self.response = json_codec.read_content(SampleResponse, event.data.encode())
                        operation.learn(self.response)
                        for index, sequence in enumerate(self.response.sequences):
                            yield StreamChunk(index, [], None, sequence.stop_reason)
                        return
                    elif event.event == "error":
                        found = json_codec.decode_answer(event.data.encode())
                        raise RequestFailedError(str(found.get("error")), "", found.get("category", "unknown"))
        raise APIResponseValidationError(None, None, "The stream ended before the service said it was done.")


async def _close(source: Any) -> None:
    """A generator cannot be closed while somebody is inside it: wait until the cancelled step has left."""
    while source.ag_running:
        await asyncio.sleep(0.01)
    await source.aclose()


async def _next(source: Any) -> StreamChunk | None:
    try:
        return await anext(source)
    except StopAsyncIteration:
        return None


def _token(data: str) -> StreamChunk:
    found = json_codec.decode_answer(data.encode())
    try:
        return StreamChunk(int(found.get("index", 0)), list(found["tokens"]), found.get("logprobs"))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise APIResponseValidationError(body=found, message=f"The stream brought no tokens: {data:.200}") from None
