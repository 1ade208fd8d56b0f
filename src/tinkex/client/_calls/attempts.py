"""The one loop that repeats a failed request. `retry` decides when, `errors` decides whether, this module acts.

Calls, samples, streams, polls, batched polls and downloads all use `Attempts.run`. They differ in what a failure means
to them: `Attempts` itself is the rule for ordinary calls, and a subclass overrides `delay_after` where another rule
holds (a 429 for a sample, silence for a poll, progress for a download).

The pool of connections repeats a request once by itself if it was sent on a connection that the service had closed
while it was idle (`_http/pool.py`). That does not count as a retry: the service never had the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from tinkex import events
from tinkex.client._calls.retry import RetryPolicy, retry_after
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
) -> HTTPResponse:
    """Make an ordinary call: send the same bytes under the same key until there is a response below 400; return it."""
    key = link.idempotency_key() if endpoint.method != "GET" else None

    async def send_once(attempt: int) -> HTTPResponse:
        operation.attempts = attempt
        response = await send(
            link, endpoint, body, path=path, headers=headers, key=key, attempt=attempt, follow=follow, raises=True
        )
        operation.last_response_at = link.clock.now()
        return response

    return await Attempts(link, operation, endpoint.name, max_attempts).run(send_once)


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
