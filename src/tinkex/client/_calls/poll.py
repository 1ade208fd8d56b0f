"""From a request id to a result: long polls, paced so that no response can make a hot loop, ended by result or error.

A pending response is no failure: the loop here asks again. A response that says nothing about the result counts as one:
`PollAttempts` repeats that poll for as long as silence is allowed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import tinkex.types
from tinkex import events
from tinkex.client._calls.attempts import Attempts
from tinkex.client._calls.decode import INLINE_BYTES, decoded
from tinkex.client._calls.retry import QUICK_S, fault_delay, pending_delay
from tinkex.client._calls.send import response_error, send
from tinkex.client._http.transport import Headers
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIError, APIStatusError, DeadlineExceeded, RequestFailedError, ResultExpired
from tinkex.wire import envelope, requests
from tinkex.wire.body import JSON, PROTOBUF
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import ASAMPLE, RETRIEVE_FUTURE, Endpoint, Pool

log = logging.getLogger("tinkex.poll")
POLL_TIMEOUT_S = 60.0
"""Services hold a poll for at most 45 s; silence beyond this is a fault of the network."""
NOT_YET_VISIBLE_S = 30.0
"""A 404 this soon after acceptance may come from a replica that has not heard of the request yet."""
RETRIEVE_SAMPLE = RETRIEVE_FUTURE._replace(pool=Pool.RETRIEVE_SAMPLES)
BINARY = frozenset({"SampleResponse", "ForwardBackwardOutput"})


async def poll(
    link: ServiceLink,
    operation: Operation,
    endpoint: Endpoint,
    request_id: str,
    sequence_ids: Sequence[str] = (),
    asked: int | None = None,
) -> Any:
    """Wait for the result of an accepted request. Raises what the service says, or why waiting makes no sense.

    `sequence_ids` are those that the service announced when it accepted a sample: its result does not repeat them.
    `asked` is how many datums or samples the request had, if any: no result has more.
    """
    clock = link.clock
    polls = PollAttempts(link, operation, endpoint, request_id, sequence_ids, asked)
    last_pending_at = polls.accepted_at
    quick = reserved = 0
    try:
        while True:
            read = await polls.run(polls.ask)
            now = operation.last_response_at = link.last_progress_at = clock.now()
            if isinstance(read, envelope.Done):
                if polls.has_size:  # it had ended before this poll, which did nothing but bring the result
                    operation.fetch_s += now - polls.sent_at
                _emit(operation, request_id, "done")
                return read.value
            if isinstance(read, envelope.Failed):
                _emit(operation, request_id, "failed")
                raise RequestFailedError(read.error, request_id, read.category)
            if isinstance(read, envelope.Metadata) and not polls.has_size:
                _emit(operation, request_id, "metadata")
                await link.limiter.results.acquire(read.size)
                reserved, polls.has_size = read.size, True
                continue
            if isinstance(read, envelope.Metadata):  # the size again instead of the result: reserve no more
                read = envelope.Pending()
            _note_queue(operation, request_id, read, now - last_pending_at)
            last_pending_at = now
            quick = quick + 1 if now - polls.sent_at < QUICK_S else 0
            await clock.sleep(pending_delay(quick))
    finally:
        if polls.has_size:
            link.limiter.results.release(reserved)


class PollAttempts(Attempts):
    """Asks for one result. Failures never use up a count: only silence of `unreachable_s` ends the waiting."""

    __slots__ = (
        "_asked", "_dialect", "_endpoint", "_headers", "_iteration", "_request_id", "_result_type", "_retrieve",
        "_sequence_ids", "accepted_at", "has_size", "sent_at",
    )  # fmt: skip

    def __init__(
        self,
        link: ServiceLink,
        operation: Operation,
        endpoint: Endpoint,
        request_id: str,
        sequence_ids: Sequence[str],
        asked: int | None,
    ) -> None:
        super().__init__(link, operation, RETRIEVE_FUTURE.name)
        self.accepted_at = self.sent_at = operation.last_response_at = self.started_at
        self.has_size = False
        """Whether the size of the result is known and its bytes are reserved."""
        self._endpoint = endpoint
        self._request_id = request_id
        self._sequence_ids = sequence_ids
        self._asked = asked
        self._result_type = getattr(tinkex.types, endpoint.answer)
        self._retrieve = RETRIEVE_SAMPLE if endpoint is ASAMPLE else RETRIEVE_FUTURE
        self._dialect = link.dialect or Dialect.JSON
        is_binary = self._dialect is Dialect.PROTO and endpoint.answer in BINARY
        self._headers = {"x-tinker-request-type": endpoint.request_type, "accept": PROTOBUF if is_binary else JSON}
        self._iteration = 0

    async def ask(self, attempt: int) -> envelope.Envelope:
        """Send one poll and read its response."""
        self.sent_at = self.link.clock.now()
        self._headers["x-tinker-request-iteration"] = str(self._iteration)
        self._iteration += 1
        self.operation.polls += 1
        self.link.stats.polls += 1
        # The service says the size of a large result first: its bytes are then reserved before it is fetched.
        wants_size = self._dialect is Dialect.PROTO and not self.has_size
        body = requests.retrieve_future(self._request_id, wants_size, dialect=self._dialect)
        response = await send(self.link, self._retrieve, body, headers=self._headers, timeout_s=POLL_TIMEOUT_S)
        if response.status not in (200, 408):
            raise response_error(self.link, response, RETRIEVE_FUTURE)
        status, headers, content = response
        if len(content) <= INLINE_BYTES:
            return self._read(status, headers, content)
        return await decoded(functools.partial(self._read, status, headers, content), len(content))

    def _read(self, status: int, headers: Headers, content: bytes) -> envelope.Envelope:
        return envelope.read(
            status, headers, content, self._result_type, self._request_id, self._sequence_ids, self._asked
        )

    def delay_after(self, error: APIError, attempt: int) -> float:
        status = error.status_code if isinstance(error, APIStatusError) else 0
        if status == 410:
            raise ResultExpired(
                f"The service no longer has the result of request {self._request_id} ({self._endpoint.name}). Expired, "
                "or lost in a restart. Check the run's state before repeating a training step."
            )
        may_become_visible = status == 404 and self.sent_at - self.accepted_at < NOT_YET_VISIBLE_S
        if not (error.retryable or may_become_visible):
            raise error
        operation, config = self.operation, self.link.config
        operation.last_error = f"{type(error).__name__}: {error}"
        now = self.link.clock.now()
        if status == 429:  # the service is there, and has too much to do: that is no silence
            operation.last_response_at = now
        silent_s = now - operation.last_response_at
        _emit(operation, self._request_id, "error")
        if silent_s >= config.unreachable_s:
            raise DeadlineExceeded(
                f"{operation.name}: no valid response from {config.base_url} for {silent_s:.0f} s "
                f"(unreachable_s={config.unreachable_s:.0f}). Last error: {operation.last_error.rstrip('.')}. "
                f"Request {self._request_id} may still be running there."
            ) from error
        self.link.warn_unreachable(error, attempt)
        return min(fault_delay(attempt - 1, self.hint_s(error)), max(config.unreachable_s, 0.01))


def _note_queue(operation: Operation, request_id: str, read: Any, took_s: float) -> None:
    state, reason = read.queue_state, read.reason
    if state and state != "active":
        operation.queue_s += took_s
    if (state, reason) != (operation.queue_state, operation.queue_reason):
        operation.queue_state, operation.queue_reason = state, reason
        if state:
            for observer in operation.observers:
                try:
                    observer(state, reason)
                except (Exception, SystemExit):
                    log.exception("A queue-state observer of %s failed", operation.name)
            if events.wanted("queue"):
                owner = (operation.model_id, operation.session_id, operation.number)
                events.emit("queue", events.QueueEvent(operation.kind, request_id, state, reason, *owner))
    _emit(operation, request_id, "pending")


def _emit(operation: Operation, request_id: str, outcome: str) -> None:
    if events.wanted("poll"):
        events.emit("poll", events.PollEvent(operation.kind, request_id, operation.polls, outcome))
