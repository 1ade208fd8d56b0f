"""One sample from submission to answer. A 429 goes to the shared limiter and to nothing else; other transient faults go
through the one retry curve; a result that was lost or failed on the service is asked for again, three times at most."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

from tinkex import events
from tinkex.client._calls.call import error_of, hint_of, send
from tinkex.client._calls.poll import poll
from tinkex.client._calls.retry import RetryPolicy
from tinkex.client._runtime.link import Connection
from tinkex.client._runtime.operation import Operation
from tinkex.client.future import APIFuture
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    DeadlineExceeded,
    RequestFailedError,
    ResultExpired,
)
from tinkex.types.inputs import ModelInput
from tinkex.types.sampling import SampleResponse, SamplingParams
from tinkex.types.tensor import TensorData
from tinkex.wire import endpoints, envelope, requests
from tinkex.wire.body import Body
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import ASAMPLE

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient

RESUBMISSIONS = 3
LARGE_BYTES = 128 << 10
_BACKPRESSURE = {"x-tinker-sampling-backpressure": "1"}


class Sample(NamedTuple):
    """What the caller asked for."""

    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool = False

    def body(self, sampling_session_id: str, seq_id: int | None, dialect: Dialect) -> Body:
        return requests.asample(
            self.prompt,
            self.num_samples,
            self.params,
            sampling_session_id=sampling_session_id,
            seq_id=seq_id or 0,
            prompt_logprobs=self.prompt_logprobs,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
            target_prompt_logprobs=self.target_prompt_logprobs,
            prompt_alt_tokens_k=self.prompt_alt_tokens_k,
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
            record_stability_info=self.record_stability_info,
            dialect=dialect,
        )


async def run_sample(
    connection: Connection, operation: Operation, client: SamplingClient, request: Sample
) -> SampleResponse:
    """Submit, wait, and if the service lost or broke it, ask again."""
    dialect = connection.dialect or await connection.ready()
    if operation.seq_id is None:
        operation.seq_id = await client._join(connection, operation)
    limiter = connection.limiter
    await limiter.samples.acquire()
    try:
        for again in range(RESUBMISSIONS + 1):
            body = request.body(client._sampling_session_id, operation.seq_id, dialect)
            accepted = await _dispatch(connection, operation, body)
            if connection.server.sample_use_retrieve_futures:
                await client._batch(connection).ready(accepted.request_id)
            try:
                found = await poll(connection, operation, ASAMPLE, accepted.request_id)
            except (ResultExpired, RequestFailedError) as problem:
                if again == RESUBMISSIONS or not problem.retryable:
                    raise
                _tell_retry(connection, "asample", again + 1, 0.0, str(problem))
                # A new number: under the old one the service would hand out the same failure again.
                operation.seq_id = client._next_seq_id()
                continue
            return _named(found, accepted.sample_sequence_ids)
    finally:
        limiter.samples.release()
    raise AssertionError("unreachable")


async def _dispatch(connection: Connection, operation: Operation, body: Body) -> envelope.Accepted:
    """Until accepted: the same bytes, the same seq_id, the same idempotency key."""
    gate = connection.limiter.dispatch
    config = connection.config
    policy = RetryPolicy(max_attempts=config.max_retries, budget_s=config.unreachable_s)
    started = connection.clock.now()
    size = len(body.content)
    key = connection.idempotency_key()
    attempt = faults = 0
    faulty_since: float | None = None
    while True:
        await gate.acquire(size)
        attempt += 1
        operation.state, operation.attempts = "submitting", attempt
        try:
            answer = await send(connection, ASAMPLE, body, headers=_BACKPRESSURE, key=key, attempt=attempt)
            if answer.status < 400:
                return _accepted(connection, operation, answer.content)
            error: APIError = error_of(connection, answer, ASAMPLE)
        except APIConnectionError as problem:
            error = problem
        finally:
            gate.release(size)
        operation.last_error = f"{type(error).__name__}: {error}"
        if not error.retryable:
            raise error
        now = connection.clock.now()
        hint_s = hint_of(error, connection)
        if isinstance(error, APIStatusError) and error.status_code == 429:
            connection.stats.rate_limited += 1
            if hint_s is not None and hint_s > config.unreachable_s:
                error.args = (f"{error} The service asks for {hint_s:.0f} s, more than unreachable_s allows.",)
                raise error
            gate.back_off(hint_s or (5.0 if size > LARGE_BYTES else 1.0))
            _refuse_standstill(connection, operation, started, now)
            _tell_retry(connection, "asample", attempt, hint_s or 0.0, operation.last_error)
            continue
        faulty_since = now if faulty_since is None else faulty_since  # waiting out rate limits is no fault
        elapsed_s = max(now - faulty_since, connection.silent_s(operation))
        delay_s = policy.delay(faults, elapsed_s, hint_s, random.random)
        faults += 1
        if delay_s is None:
            error.args = (f"sample: gave up after {attempt} attempts in {elapsed_s:.0f} s. Last problem: {error}",)
            raise error
        connection.stats.retries += 1
        connection.say_unreachable(error, faults)
        _tell_retry(connection, "asample", attempt, delay_s, operation.last_error)
        await connection.clock.sleep(delay_s)


def _accepted(connection: Connection, operation: Operation, content: bytes) -> envelope.Accepted:
    accepted = envelope.read_accepted(content)
    operation.state = "accepted"
    operation.request_id = accepted.request_id
    operation.accepted_at = operation.last_answer_at = connection.last_progress_at = connection.clock.now()
    return accepted


def _refuse_standstill(connection: Connection, operation: Operation, started: float, now: float) -> None:
    """Rate limits are waited out as long as *some* sample gets through; a service that takes none is given up."""
    idle_s = now - max(started, connection.last_progress_at)
    if idle_s >= connection.config.unreachable_s:
        raise DeadlineExceeded(
            f"{operation.name}: the service has answered 429 to every sample for {idle_s:.0f} s. Lower the load, or "
            f"raise unreachable_s ({connection.config.unreachable_s:.0f}). Last answer: {operation.last_error}"
        )


def _named(found: SampleResponse, sequence_ids: list[str] | None) -> SampleResponse:
    """Give each sequence the id that the service announced for it."""
    for sequence, sequence_id in zip(found.sequences, sequence_ids or (), strict=False):
        if not sequence.sequence_id:  # just decoded and seen by nobody: naming it breaks no promise
            object.__setattr__(sequence, "sequence_id", sequence_id)
            object.__setattr__(sequence, "_given", sequence._given | {"sequence_id"})
    return found


def cancel_on_service(connection: Connection, operation: Operation, done: APIFuture[Any]) -> None:
    """Where the service offers it, stop a sample nobody waits for any more. Best effort."""
    if not done.cancelled():
        return

    async def work() -> None:
        try:
            if operation.request_id is not None:
                await send(connection, endpoints.CANCEL_FUTURE, requests.cancel_future(operation.request_id))
        except APIError:
            pass

    connection.loop.post(lambda: connection.loop.spawn(work()))


def _tell_retry(connection: Connection, endpoint: str, attempt: int, delay_s: float, reason: str) -> Any:
    if events.wanted("retry"):
        events.emit("retry", events.RetryEvent(endpoint, attempt, delay_s, reason))
