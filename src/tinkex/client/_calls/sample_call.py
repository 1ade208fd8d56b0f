"""One sample from submission to result. A 429 goes to the shared limiter and to nothing else; other transient faults
follow the one retry curve; a result that was lost or failed on the service is asked for again, three times at most."""

from __future__ import annotations

from typing import Any, NamedTuple

from tinkex.client._calls.attempts import QueuedAttempts
from tinkex.client._calls.decode import read_accepted
from tinkex.client._calls.handshake import ready
from tinkex.client._calls.poll import poll
from tinkex.client._calls.sampling_session import SamplingSession
from tinkex.client._calls.send import send
from tinkex.client._http.transport import HTTPResponse
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.client.future import APIFuture
from tinkex.errors import APIError, APIStatusError, DeadlineExceeded, RequestFailedError, ResultExpired
from tinkex.types.inputs import ModelInput
from tinkex.types.sampling import SampleResponse, SamplingParams
from tinkex.types.tensor import TensorData
from tinkex.wire import endpoints, requests
from tinkex.wire.body import Body
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import ASAMPLE

RESUBMISSIONS = 3
LARGE_BYTES = 128 << 10
_BACKPRESSURE = {"x-tinker-sampling-backpressure": "1"}


class SampleCall(NamedTuple):
    """What the caller asked for."""

    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    include_prompt_logprobs: bool | None = None
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
            prompt_logprobs=self.include_prompt_logprobs,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
            target_prompt_logprobs=self.target_prompt_logprobs,
            prompt_alt_tokens_k=self.prompt_alt_tokens_k,
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
            record_stability_info=self.record_stability_info,
            dialect=dialect,
        )


async def run_sample(
    link: ServiceLink, operation: Operation, sampling: SamplingSession, sample: SampleCall
) -> SampleResponse:
    """Submit, wait, and if the service lost or broke the sample, submit it again."""
    dialect = link.dialect or await ready(link)
    if operation.seq_id is None:
        operation.seq_id = await sampling.join(link, operation)
    limiter = link.limiter
    await limiter.samples.acquire()
    try:
        for resubmissions in range(RESUBMISSIONS + 1):
            body = sample.body(sampling.sampling_session_id, operation.seq_id, dialect)
            attempts = SampleAttempts(link, operation, ASAMPLE.name, body)
            accepted = await read_accepted((await attempts.run(attempts.submit_once)).content)
            attempts.note_accepted()
            operation.request_id = accepted.request_id
            if link.server.sample_use_retrieve_futures:
                await sampling.batch(link).wait_until_ready(accepted.request_id)
            try:
                sequence_ids = accepted.sample_sequence_ids or ()
                return await poll(  # type: ignore[no-any-return]
                    link, operation, ASAMPLE, accepted.request_id, sequence_ids, sample.num_samples
                )
            except (ResultExpired, RequestFailedError) as error:
                if resubmissions == RESUBMISSIONS or not error.retryable:
                    raise
                attempts.emit_retry(resubmissions + 1, 0.0, str(error))
                # A new number: under the old one the service would hand out the same failure again.
                operation.seq_id = sampling.next_seq_id()
    finally:
        limiter.samples.release()
    raise AssertionError("unreachable")


class SampleAttempts(QueuedAttempts):
    """Submits one sample: the same bytes, the same seq_id, the same idempotency key in every attempt.

    A 429 closes the shared gate, which holds every sampler's next attempt back; other failures follow the curve.
    """

    __slots__ = ("_size_bytes", "body", "key")

    def __init__(self, link: ServiceLink, operation: Operation, name: str, body: Body) -> None:
        super().__init__(link, operation, name)
        self.body = body
        self.key = link.idempotency_key()
        self._size_bytes = len(body.content)
        self._faulty_since = None  # the gate may have held it for long

    async def submit_once(self, attempt: int) -> HTTPResponse:
        """Send the sample when the gate admits it."""
        await self.enter(attempt)
        try:
            return await send(
                self.link, ASAMPLE, self.body, headers=_BACKPRESSURE, key=self.key, attempt=attempt, raises=True
            )
        finally:
            self.leave()

    async def enter(self, attempt: int) -> None:
        """Wait until the gate admits this attempt."""
        await self.link.limiter.dispatch.acquire(self._size_bytes)
        self.operation.state, self.operation.attempts = "submitting", attempt

    def leave(self) -> None:
        self.link.limiter.dispatch.release(self._size_bytes)

    def note_accepted(self) -> None:
        """The service has taken the sample."""
        operation = self.operation
        operation.state = "accepted"
        now = self.link.clock.now()
        operation.accepted_at = operation.last_response_at = self.link.last_progress_at = now

    def delay_after(self, error: APIError, attempt: int) -> float:
        self.note(error)
        if isinstance(error, APIStatusError) and error.status_code == 429:
            self._back_off(error, attempt)
            return 0.0
        return self.fault_pause(error, attempt)

    def _back_off(self, error: APIStatusError, attempt: int) -> None:
        """Slow all samplers down. Fails only if the service has taken no sample at all for `unreachable_s`."""
        link, hint_s = self.link, self.hint_s(error)
        unreachable_s = link.config.unreachable_s
        link.stats.rate_limited += 1
        if hint_s is not None and hint_s > unreachable_s:
            error.args = (f"{error} The service asks for {hint_s:.0f} s, more than unreachable_s allows.",)
            raise error
        link.limiter.dispatch.back_off(hint_s or (5.0 if self._size_bytes > LARGE_BYTES else 1.0))
        idle_s = link.clock.now() - max(self.started_at, link.last_progress_at)
        if idle_s >= unreachable_s:
            raise DeadlineExceeded(
                f"{self.operation.name}: the service has answered 429 to every sample for {idle_s:.0f} s. Lower the "
                f"load, or raise unreachable_s ({unreachable_s:.0f}). Last response: {self.operation.last_error}"
            )
        self.emit_retry(attempt, hint_s or 0.0, self.operation.last_error or "")


def cancel_on_service(link: ServiceLink, operation: Operation, done: APIFuture[Any]) -> None:
    """Where the service offers it, stop a sample that was cancelled here. Best effort."""
    if not done.cancelled():
        return

    async def work() -> None:
        try:
            if operation.request_id is not None:
                await send(link, endpoints.CANCEL_FUTURE, requests.cancel_future(operation.request_id))
        except APIError:
            pass

    link.loop.post(lambda: link.loop.spawn(work()))
