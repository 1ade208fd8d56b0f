"""`SampleStream`: tokens as the service makes them, over server-sent events. Read once, with `for` or `async for`."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

from tinkex.client._calls.decode import decoded, read_object, read_value
from tinkex.client._calls.handshake import ready
from tinkex.client._calls.sample_call import SampleAttempts, SampleCall, run_sample
from tinkex.client._calls.sampling_session import SamplingSession
from tinkex.client._calls.send import open_events, read_events
from tinkex.client._http.transport import StreamedResponse
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.client._runtime.pump import Pump
from tinkex.client._runtime.session import Session
from tinkex.errors import APIResponseValidationError, RequestFailedError, StreamAlreadyConsumed
from tinkex.events import Usage
from tinkex.types.coerce import Mismatch, coercer, is_lenient
from tinkex.types.sampling import SampleResponse
from tinkex.wire import endpoints, json_codec
from tinkex.wire.body import Body

MAX_TOKEN_BYTES = 1 << 20
"""Of one event with tokens, which has a few hundred bytes. Our server sends up to 300,000 to a reader that is slow."""


class StreamChunk(NamedTuple):
    """Some tokens of one of the samples."""

    sample: int
    """Which of the samples, from 0."""
    tokens: list[int]
    logprobs: list[float | None] | None
    """None for a token whose log-probability the service does not give; ours gives all of them."""
    stop_reason: str | None = None
    """Set in the last chunk of a sample."""


class SampleStream:
    """An iterator of `StreamChunk`; afterwards `.response` is the whole `SampleResponse`. One operation in all."""

    def __init__(
        self, session: Session, sampling: SamplingSession, sample: SampleCall, usage: Callable[[], Usage]
    ) -> None:
        self._session = session
        self._sampling = sampling
        self._sample = sample
        self._usage = usage
        self._is_taken = False
        self.response: SampleResponse | None = None

    def __iter__(self) -> Iterator[StreamChunk]:
        chunks = iter(self._pump())  # raises on the SDK's own loop thread, where the stream stays unread
        self._is_taken = True
        return chunks

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        chunks = aiter(self._pump())
        self._is_taken = True
        return chunks

    def _pump(self) -> Pump[StreamChunk]:
        if self._is_taken:
            raise StreamAlreadyConsumed("This stream was read already. Call stream() again for another sample.")
        link = self._session.link()
        model_id = self._sampling.sampling_session_id
        operation = Operation("stream", link.clock.now(), model_id=model_id, session=self._session)
        operation.usage = self._usage()
        return Pump(link, operation, lambda put: self._receive(link, operation, put))

    async def _receive(
        self, link: ServiceLink, operation: Operation, put: Callable[[StreamChunk], None]
    ) -> SampleResponse:
        dialect = await ready(link)
        operation.seq_id = self._sampling.next_seq_id()
        if operation.seq_id is None:
            operation.seq_id = await self._sampling.join(link, operation)
        link.announce(operation)
        if not link.extensions.get("stream"):
            self.response = await run_sample(link, operation, self._sampling, self._sample)
            for index, sequence in enumerate(self.response.sequences):
                logprobs: list[float | None] | None = None if sequence.logprobs is None else [*sequence.logprobs]
                put(StreamChunk(index, sequence.tokens, logprobs, sequence.stop_reason))
            return self.response
        body = self._sample.body(self._sampling.sampling_session_id, operation.seq_id, dialect)
        await link.limiter.samples.acquire()
        try:
            self.response = await _stream(link, operation, body, put, TokenBudget(self._sample))
        finally:
            link.limiter.samples.release()
        for index, sequence in enumerate(self.response.sequences):
            put(StreamChunk(index, [], None, sequence.stop_reason))
        return self.response


class TokenBudget:
    """Counts what a stream brings: a service that never ends it must not fill the memory of its reader."""

    def __init__(self, sample: SampleCall) -> None:
        self._samples = sample.num_samples
        max_tokens = sample.params.max_tokens
        self._left = None if max_tokens is None else sample.num_samples * (max_tokens + 1)
        """None: only the bytes of the stream are limited. One more for each sample: its last event may be empty."""

    def spend(self, chunk: StreamChunk) -> None:
        """Count a chunk. Raises APIResponseValidationError if it was not asked for."""
        if not 0 <= chunk.sample < self._samples:
            raise APIResponseValidationError(
                message=f"The stream brought tokens of sample {chunk.sample}, and {self._samples} were asked for."
            )
        if self._left is not None:
            self._left -= len(chunk.tokens) or 1
            if self._left < 0:
                raise APIResponseValidationError(message="The stream brought more tokens than were asked for.")


async def _stream(
    link: ServiceLink, operation: Operation, body: Body, put: Callable[[StreamChunk], None], budget: TokenBudget
) -> SampleResponse:
    """Open the stream, repeating that until its first byte is here; then read it. It is not resumed.

    The gate is held until that byte: a service that is asked for many streams sends it when the first token is there.
    """
    attempts = SampleAttempts(link, operation, endpoints.SAMPLE_STREAM.name, body)

    async def open_once(attempt: int) -> StreamedResponse:
        await attempts.enter(attempt)
        try:
            return await open_events(link, endpoints.SAMPLE_STREAM, body, key=attempts.key, attempt=attempt)
        finally:
            attempts.leave()

    response = await attempts.run(open_once)
    try:
        attempts.note_accepted()
        async for event in read_events(link, response):
            if event.event == "token":
                chunk = await decoded(functools.partial(_chunk, event.data), len(event.data))
                budget.spend(chunk)
                put(chunk)
            elif event.event == "done":
                return await read_value(SampleResponse, event.data.encode())
            elif event.event == "error":
                failure = await read_object(event.data.encode())
                raise RequestFailedError(f"{failure.get('error')!s:.10000}", "", str(failure.get("category")))
    finally:
        response.close()
    raise APIResponseValidationError(None, None, "The stream ended before the service said it was done.")


def _chunk(data: str) -> StreamChunk:
    if len(data) > MAX_TOKEN_BYTES:
        raise APIResponseValidationError(message=f"The stream brought tokens in an event of {len(data):,} bytes.")
    token = json_codec.decode_answer(data.encode())
    lenient = is_lenient.set(True)  # as in other responses: a service may write numbers as text
    try:
        return StreamChunk(_INT(token.get("index", 0)), _INTS(token["tokens"]), _FLOATS(token.get("logprobs")))
    except (AttributeError, KeyError, TypeError, Mismatch):
        raise APIResponseValidationError(body=token, message=f"The stream brought no tokens: {data:.200}") from None
    finally:
        is_lenient.reset(lenient)


_INT, _INTS, _FLOATS = coercer(int), coercer(list[int]), coercer(list[float | None] | None)
