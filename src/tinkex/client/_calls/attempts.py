"""The one loop that repeats a failed request. `retry` decides when, `errors` decides whether, this module acts.

Calls, samples, streams, polls, batched polls and downloads all use `Attempts.run`. They differ in what a failure means
to them: `Attempts` itself is the rule for ordinary calls, and a subclass overrides `delay_after` where another rule
holds. The differences, and above all what a 429 means:

    who                               class             a 429
    training calls, saves, new runs,  QueuedAttempts    with Retry-After: not accepted yet. Waited out until
      chats                                             `deadline_s`. Without: a fault like others
    samples, streams of samples       SampleAttempts    closes the gate of all samplers. Fails if the service took
                                                        no sample at all for `unreachable_s`
    polls                             PollAttempts      a sign of life: waited out until `deadline_s`
    questions (REST), sessions,       Attempts          a fault like others: `max_retries` attempts, with the pauses
      handshake, tokens, close()                        that the service asks for. No step of a run is lost
    batched polls                     BatchAttempts     after three faults, whichever, samples are polled one by one
    downloads                         DownloadAttempts  counts while nothing arrives; the next call goes on from there

A 503 with Retry-After is treated like such a 429 by `QueuedAttempts`, as long as the service gives signs of life.

The pool of connections repeats a request once by itself if it was sent on a connection that the service had closed
while it was idle (`_http/pool.py`). That does not count as a retry: the service never had the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from tinkex import events
from tinkex.client._calls.retry import RetryPolicy, put_off_delay, retry_after
from tinkex.client._calls.send import send
from tinkex.client._http.transport import HTTPResponse
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import Operation
from tinkex.errors import APIConnectionError, APIError, APIStatusError, DeadlineExceeded
from tinkex.wire.body import Body
from tinkex.wire.endpoints import Endpoint

T = TypeVar("T")


async def call(
    link: ServiceLink,
    endpoint: Endpoint,
    body: Body | None = None,
    *,
    operation: Operation,
    path: str | None = None,
    headers: Mapping[str, str] | None = None,
    max_attempts: int | None = None,
    follow: bool = True,
    is_queued: bool = False,
) -> HTTPResponse:
    """Make an ordinary call: send the same bytes under the same key until there is a response below 400; return it.

    `is_queued`: it brings work to a queue of the service; a full one is waited out.
    """
    key = link.idempotency_key() if endpoint.method != "GET" else None

    async def send_once(attempt: int) -> HTTPResponse:
        operation.attempts = attempt
        response = await send(
            link, endpoint, body, path=path, headers=headers, key=key, attempt=attempt, follow=follow, raises=True
        )
        operation.last_response_at = link.clock.now()
        return response

    kind = QueuedAttempts if is_queued else Attempts
    return await kind(link, operation, endpoint.name, max_attempts).run(send_once)


class Attempts:
    """All attempts at one request, under the name of its endpoint in events and messages. Loop thread.

    Slots, and a policy that is made after a first failure: thousands of samples are in flight at once, and the
    garbage collector looks at every object of theirs.
    """

    __slots__ = ("_max_attempts", "link", "name", "operation", "started_at")

    def __init__(self, link: ServiceLink, operation: Operation, name: str, max_attempts: int | None = None) -> None:
        self.link = link
        self.operation = operation
        self.name = name
        self._max_attempts = max_attempts
        self.started_at = link.clock.now()

    @property
    def policy(self) -> RetryPolicy:
        config = self.link.config
        return RetryPolicy(max_attempts=self._max_attempts or config.max_retries, budget_s=config.unreachable_s)

    async def run(self, send_once: Callable[[int], Awaitable[T]]) -> T:
        """Return what `send_once(attempt)` returns, as soon as it does; attempts count from 1."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return await send_once(attempt)
            except APIError as caught:
                error = caught
            # Outside of the handler: an error raised here must not name the one it replaces as its context.
            await self.link.clock.sleep(self.delay_after(error, attempt))

    def delay_after(self, error: APIError, attempt: int) -> float:
        """Return the seconds to wait after a failed attempt, or raise the error that ends the attempts."""
        self.note(error)
        return self.curve_delay(error, attempt, attempt, self.started_at)

    def note(self, error: APIError) -> None:
        """Keep the error for `future.status()`; raise it if repeating the request cannot help."""
        self.operation.last_error = f"{type(error).__name__}: {error}"
        if not error.retryable:
            raise error

    def curve_delay(self, error: APIError, attempt: int, faults: int, faulty_since: float) -> float:
        """Return the pause of the retry curve after `faults` failures, and report it; raise if there is none left."""
        elapsed_s = max(self.link.clock.now() - faulty_since, self.link.silent_s(self.operation))
        delay_s = self.policy.delay(faults - 1, elapsed_s, self.hint_s(error))
        if delay_s is None:
            raise self._gave_up(error, attempt, elapsed_s)
        self.link.stats.retries += 1
        self.link.warn_unreachable(error, faults)
        self.emit_retry(attempt, delay_s, self.operation.last_error or "")
        return delay_s

    def hint_s(self, error: APIError) -> float | None:
        """Return the pause that the service asked for, if it responded and asked."""
        if isinstance(error, APIStatusError):
            return retry_after(error.response.headers, self.link.clock.wall())
        return None

    def emit_retry(self, attempt: int, delay_s: float, reason: str) -> None:
        if events.wanted("retry"):
            events.emit("retry", events.RetryEvent(self.name, attempt, delay_s, reason))

    def _gave_up(self, error: APIError, attempts: int, elapsed_s: float) -> Exception:
        """Return the last error with a message that says how often and how long it was tried."""
        text = f"{self.name}: gave up after {attempts} attempts in {elapsed_s:.0f} s. Last error: {error}"
        if isinstance(error, APIStatusError):
            error.args = (text,)
            error.message = text
            return error
        if isinstance(error, APIConnectionError):
            return type(error)(None, text)
        return DeadlineExceeded(text)


class QueuedAttempts(Attempts):
    """Brings work to a queue of the service. "Not accepted yet" is no failure: it uses up no attempts, only time.

    The service says so with a 429, or a 503, and a Retry-After. A training call that failed there for its number of
    attempts would be missing from its run, and the steps behind it would train something else.

    Without Retry-After nothing says that waiting helps: the spent account of a hosted service and the page of a proxy
    look alike. Such a response is a fault as before.
    """

    __slots__ = ("_faults", "_faulty_since", "_put_off")

    def __init__(self, link: ServiceLink, operation: Operation, name: str, max_attempts: int | None = None) -> None:
        super().__init__(link, operation, name, max_attempts)
        self._faults = 0
        """In a row: being put off is a sign of life."""
        self._faulty_since: float | None = self.started_at
        self._put_off = 0

    async def run(self, send_once: Callable[[int], Awaitable[T]]) -> T:
        result = await super().run(send_once)
        if self.operation.put_off_reason:  # it was accepted after all: nothing of that is an error
            self.operation.put_off_reason, self.operation.last_error = "", None
        return result

    def delay_after(self, error: APIError, attempt: int) -> float:
        self.note(error)
        if isinstance(error, APIStatusError) and (hint_s := self.put_off_s(error)) is not None:
            return self._put_off_delay(error, attempt, hint_s)
        self.operation.put_off_reason = ""
        return self.fault_pause(error, attempt)

    def fault_pause(self, error: APIError, attempt: int) -> float:
        """Count a fault and return the pause of the retry curve; raise if there is none left."""
        if self._faulty_since is None:  # waiting until the service accepts is no fault
            self._faulty_since = self.link.clock.now()
        self._faults += 1
        self._put_off = 0
        return self.curve_delay(error, attempt, self._faults, self._faulty_since)

    def put_off_s(self, error: APIStatusError) -> float | None:
        """Return the pause that the service asks for if it puts the request off; None if it does not."""
        return self.hint_s(error) if error.status_code in (429, 503) else None

    def _put_off_delay(self, error: APIStatusError, attempt: int, hint_s: float) -> float:
        link, operation = self.link, self.operation
        unreachable_s = link.config.unreachable_s
        self._put_off += 1
        delay_s = put_off_delay(self._put_off, hint_s, unreachable_s)
        if error.status_code == 429:
            link.stats.rate_limited += 1
            operation.put_off_reason = _sentence(error)
        else:
            # It may come from a proxy in front of a service that is gone. Heartbeats and polls tell: while they get
            # responses below 500, the service is up.
            silent_s = link.silent_s(operation)
            if silent_s + max(hint_s, delay_s) > unreachable_s:
                raise self._gave_up(error, attempt, silent_s)
            link.stats.retries += 1
            operation.put_off_reason = ""  # a fault of the service: the waiting line shows it as the last error
        self._faults, self._faulty_since = 0, None
        self.emit_retry(attempt, delay_s, operation.last_error or "")
        return delay_s


def _sentence(error: APIStatusError) -> str:
    """Return what the service says in the body of an error: `detail`, or `error.message` as OpenAI's API has it."""
    body = error.body
    if isinstance(body, dict):
        inner = body.get("error")
        body = body.get("detail") or (inner.get("message") if isinstance(inner, dict) else inner)
    return " ".join(str(body or f"HTTP {error.status_code}")[:500].split())
