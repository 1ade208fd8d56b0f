"""From a request id to a result: long polls, paced so that no answer can make a hot loop, ended by result or reason."""

from __future__ import annotations

import logging
import random
from typing import Any

import tinkex.types
from tinkex import events
from tinkex.client._calls.call import error_of, hint_of, send
from tinkex.client._calls.retry import QUICK_S, Poll, poll_delay
from tinkex.client._http.transport import Answer
from tinkex.client._runtime.link import Connection
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIConnectionError, APIError, DeadlineExceeded, RequestFailedError, ResultExpired
from tinkex.wire import envelope, requests
from tinkex.wire.body import JSON, PROTOBUF
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import ASAMPLE, RETRIEVE_FUTURE, Endpoint, Pool

log = logging.getLogger("tinkex.poll")
POLL_TIMEOUT_S = 60.0
"""Services hold a poll for at most 45 s; silence beyond this is a fault of the network."""
NOT_YET_VISIBLE_S = 30.0
"""A 404 this soon after acceptance may be a replica that has not heard of the request yet."""
RETRIEVE_SAMPLE = RETRIEVE_FUTURE._replace(pool=Pool.RETRIEVE_SAMPLES)
BINARY = frozenset({"SampleResponse", "ForwardBackwardOutput"})


async def poll(connection: Connection, operation: Operation, endpoint: Endpoint, request_id: str) -> Any:
    """Wait for the result of an accepted request. Raises what the service says, or why waiting makes no sense."""
    clock = connection.clock
    dialect = connection.dialect or Dialect.JSON
    is_binary = dialect is Dialect.PROTO and endpoint.answer in BINARY
    retrieve = RETRIEVE_SAMPLE if endpoint is ASAMPLE else RETRIEVE_FUTURE
    headers = {"x-tinker-request-type": endpoint.request_type, "accept": PROTOBUF if is_binary else JSON}
    accepted_at = polled_at = operation.last_answer_at = clock.now()
    quick = faults = iteration = reserved = 0
    has_size = False
    try:
        while True:
            started = clock.now()
            headers["x-tinker-request-iteration"] = str(iteration)
            iteration += 1
            operation.polls += 1
            connection.stats.polls += 1
            # The size of a large answer is told first: its bytes are then reserved before it is fetched.
            wants_size = dialect is Dialect.PROTO and not has_size
            body = requests.retrieve_future(request_id, wants_size, dialect=dialect)
            try:
                answer = await send(connection, retrieve, body, headers=headers, timeout_s=POLL_TIMEOUT_S)
                read = _read(
                    connection, answer, endpoint, request_id, is_fresh=started - accepted_at < NOT_YET_VISIBLE_S
                )
            except (APIConnectionError, _Again) as problem:
                error = problem.error if isinstance(problem, _Again) else problem
                _note_fault(connection, operation, request_id, error)
                connection.say_unreachable(error, faults + 1)
                hint_s = hint_of(error, connection)
                delay_s = poll_delay(Poll.FAULT, faults, hint_s=hint_s, rng=random.random)
                faults += 1
                await clock.sleep(min(delay_s, max(connection.config.unreachable_s, 0.01)))
                continue
            now = operation.last_answer_at = connection.last_progress_at = clock.now()
            faults = 0
            if isinstance(read, envelope.Done):
                if has_size:  # it had ended before this poll, which did nothing but bring the answer
                    operation.fetch_s += now - started
                _tell(operation, request_id, "done")
                return read.value
            if isinstance(read, envelope.Failed):
                _tell(operation, request_id, "failed")
                raise RequestFailedError(read.error, request_id, read.category)
            if isinstance(read, envelope.Metadata) and not has_size:
                _tell(operation, request_id, "metadata")
                await connection.limiter.answers.acquire(read.size)
                reserved, has_size = read.size, True
                continue
            if isinstance(read, envelope.Metadata):  # told again although it was asked for: no more is reserved
                read = envelope.TryAgain()
            _note_queue(operation, request_id, read, now - polled_at)
            polled_at = now
            quick = quick + 1 if now - started < QUICK_S else 0
            await clock.sleep(poll_delay(Poll.PENDING, max(quick - 1, 0), took_s=now - started))
    finally:
        if has_size:
            connection.limiter.answers.release(reserved)


class _Again(Exception):
    """An answer that says nothing about the result: poll again."""

    def __init__(self, error: APIError) -> None:
        super().__init__(str(error))
        self.error = error


def _read(
    connection: Connection, answer: Answer, endpoint: Endpoint, request_id: str, *, is_fresh: bool
) -> envelope.Envelope:
    if answer.status in (200, 408):
        result_type = getattr(tinkex.types, endpoint.answer)
        return envelope.read(answer.status, answer.headers, answer.content, result_type, request_id)
    error = error_of(connection, answer, RETRIEVE_FUTURE)
    if answer.status == 410:
        raise ResultExpired(
            f"The service no longer has the result of request {request_id} ({endpoint.name}). Expired, or lost in a "
            "restart. Check the run's state before repeating a training step."
        )
    if error.retryable or (answer.status == 404 and is_fresh):
        raise _Again(error)
    raise error


def _note_fault(connection: Connection, operation: Operation, request_id: str, error: APIError) -> None:
    operation.last_error = f"{type(error).__name__}: {error}"
    silent_s = connection.clock.now() - operation.last_answer_at
    if events.wanted("poll"):
        events.emit("poll", events.PollEvent(operation.kind, request_id, operation.polls, "error"))
    if silent_s >= connection.config.unreachable_s:
        raise DeadlineExceeded(
            f"{operation.name}: no valid answer from {connection.config.base_url} for {silent_s:.0f} s "
            f"(unreachable_s={connection.config.unreachable_s:.0f}). Last problem: {operation.last_error.rstrip('.')}. "
            f"Request {request_id} may still be running there."
        ) from error


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
                whose = (operation.model_id, operation.session_id, operation.number)
                events.emit("queue", events.QueueEvent(operation.kind, request_id, state, reason, *whose))
    _tell(operation, request_id, "pending")


def _tell(operation: Operation, request_id: str, outcome: str) -> None:
    if events.wanted("poll"):
        events.emit("poll", events.PollEvent(operation.kind, request_id, operation.polls, outcome))
