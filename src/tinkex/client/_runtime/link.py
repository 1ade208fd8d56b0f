"""`ServiceLink`: what all clients of one service and key share, and what runs their operations.

Obtained by `link_for(config)` and in no other way. Pools and limits are keyed by (base URL, key): clients whose
settings differ only in, say, a timeout still share them. Lives as long as the process; a forked child makes its own.

The link knows no requests: `_calls/handshake.py` fills in what the service announces, `_calls/send.py` sends over it.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tinkex import events
from tinkex._version import __version__
from tinkex.client._calls.limits import limiter_for
from tinkex.client._http.transport import transport_for
from tinkex.client._runtime import tracing
from tinkex.client._runtime.auth import Auth
from tinkex.client._runtime.fork import ProcessRegistry
from tinkex.client._runtime.loop import LoopThread, loop_thread
from tinkex.client._runtime.operation import Operation
from tinkex.client._runtime.stats import Stats
from tinkex.client.future import APIFuture, reject, resolve
from tinkex.clock import REAL, Clock
from tinkex.errors import APIConnectionError, APIError, ClosedError, DeadlineExceeded, TinkexError
from tinkex.settings import Config
from tinkex.types import ClientConfigResponse, ClientDynamicConfigResponse
from tinkex.wire.dialect import Dialect

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]
log = logging.getLogger("tinkex.wait")
SILENCE_LINE_S = 10.0
"""Seconds between two lines about a service that does not respond."""


class ServiceLink:
    """Towards one service. Operations start from any thread; attributes are written on the loop thread only."""

    def __init__(self, config: Config, clock: Clock = REAL) -> None:
        self.config = config
        self.clock = clock
        self.loop: LoopThread = loop_thread()
        self.transport = transport_for(config)
        self.auth = Auth(config)
        self.limiter = limiter_for(*config.key)
        self.stats = Stats()
        self.in_flight: dict[int, Operation] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self.last_heard_at = clock.now()
        """When the last response below 500 came."""
        self.last_progress_at = self.last_heard_at
        """When the service last accepted a sample or had something to say about a result."""
        self._made_at = self.last_heard_at
        self._warned_of_silence_since: float | None = None
        self._warned_at = 0.0
        # What the service announces (`_calls/handshake.py`).
        self.server = ClientConfigResponse()
        self.dynamic = ClientDynamicConfigResponse()
        self.dialect: Dialect | None = None
        self.handshake: asyncio.Task[TinkexError | None] | None = None
        self.is_proto_proven = False
        """Whether the service has taken a protobuf body; until then a rejection may mean it cannot read them."""
        self.context_lengths: dict[str, int] = {}
        """Model name → longest context in tokens, once the service has said so."""
        self._idempotency_prefix = f"tinkex-{uuid.uuid4().hex}"
        self._idempotency_numbers = itertools.count()
        self.base_headers = {
            "accept": "application/json",
            "user-agent": f"tinkex/{__version__}",
            **{name.lower(): value for name, value in config.headers.items()},
        }
        if config.cf_client_id and config.cf_client_secret:
            self.base_headers["cf-access-client-id"] = config.cf_client_id
            self.base_headers["cf-access-client-secret"] = config.cf_client_secret

    def idempotency_key(self) -> str:
        """Return a new key: all attempts at one request carry the same one."""
        return f"{self._idempotency_prefix}-{next(self._idempotency_numbers)}"

    @property
    def extensions(self) -> dict[str, Any]:
        """What our own service announces beyond the protocol ({} elsewhere)."""
        return self.server.tinkex or {}

    def silent_s(self, operation: Operation) -> float:
        """Return how long the service has returned nothing but faults, as seen by this operation.

        Counted from before its own first attempt: an operation that queued behind a dead service does not wait the
        full time again.
        """
        return self.clock.now() - max(operation.created_at, self.last_heard_at)

    def warn_unreachable(self, error: APIError, attempt: int) -> None:
        """Log that there is no response, and again while it lasts: a dead service must not look like a slow one.

        At once if there never was a response: then the address is most likely wrong, or the service is not running.
        Else at a third attempt: services are restarted.
        """
        if not isinstance(error, APIConnectionError):
            return
        now, reason = self.clock.now(), str(error).rstrip(".")
        if self._warned_of_silence_since != self.last_heard_at:
            if attempt < 3 and self.last_heard_at != self._made_at:
                return
            self._warned_of_silence_since, self._warned_at = self.last_heard_at, now
            log.warning(
                "No response from %s (%s). Still trying, for %.0f s at most; `tinkex doctor` finds out why.",
                *(self.config.base_url, reason, self.config.unreachable_s),
            )
        elif now - self._warned_at >= SILENCE_LINE_S:
            self._warned_at = now
            log.warning("Still no response from %s (%s).", self.config.base_url, reason)

    # -- operations -------------------------------------------------------------------------------------------------

    def announce(self, operation: Operation) -> None:
        """Emit the `start` event: what a client was asked to do, before any of it is sent."""
        if events.wanted("start"):
            started = events.StartEvent(
                operation.kind, operation.model_id, operation.number, operation.usage, operation.session_id
            )
            events.emit("start", started)

    def run(
        self, operation: Operation, work: Work[T], deadline_s: float | None = None, *, begins_cancelled: bool = False
    ) -> APIFuture[T]:
        """Start an operation from any thread; its future ends with the work, the deadline or the process.

        Work that was cancelled before it began is left out, unless it has something to clean up (`begins_cancelled`).
        """
        future: APIFuture[T] = APIFuture(operation)
        operation.future = future
        limit_s = self.config.deadline_s if deadline_s is None else deadline_s
        # The caller's context travels along, so that its trace and log context are those of the request.
        context = contextvars.copy_context()

        def start() -> None:
            if begins_cancelled or not future.cancelled():
                task = self.loop.spawn(self._drive(operation, future, work, limit_s), context)
                future.add_done_callback(lambda done: self.loop.cancel(task) if done.cancelled() else None)

        self.loop.post(start)
        return future

    async def _drive(self, operation: Operation, future: APIFuture[T], work: Work[T], deadline_s: float) -> None:
        """Run one operation to its end and settle its future, whatever happens."""
        self.in_flight[id(operation)] = operation
        tracing.begin(operation, self.config.base_url)
        if self._ticker is None:
            self._wake_ticker()
        error: BaseException | None = None
        try:
            async with asyncio.timeout(deadline_s):
                value = await work()
            if events.wanted("step"):
                operation.learn(value)
        except TimeoutError as caught:
            error = caught if isinstance(caught, DeadlineExceeded) else DeadlineExceeded(
                f"Gave up after {deadline_s:.0f} s: {operation.waiting_line(self.clock.now())}. "
                "Raise deadline_s to wait longer."
            )  # fmt: skip
        except asyncio.CancelledError:
            error = ClosedError(f"{operation.name} was still open when the client stopped.")
        except Exception as caught:
            error = caught
        except (SystemExit, KeyboardInterrupt) as caught:  # from a user's callback: it would end the loop
            error = TinkexError(f"{operation.name}: a callback raised {caught!r} on the SDK's loop.")
        try:
            # Before the future is settled: its reader finds the final status. A reader that leaves early is no failure.
            self._end(operation, None if operation.is_left_early else error)
        finally:
            try:
                if error is None:
                    resolve(future, value)
                else:
                    reject(future, error)
            except (SystemExit, KeyboardInterrupt) as caught:
                log.error("A callback of %s raised %r: it cannot end the program from there.", operation.name, caught)

    def _end(self, operation: Operation, error: BaseException | None) -> None:
        del self.in_flight[id(operation)]
        now = self.clock.now()
        if operation.is_cancelled:
            operation.state = "cancelled"
        else:
            operation.state = "done" if error is None else "failed"
        if error is not None:
            operation.error = None if operation.is_cancelled else error
            operation.last_error = f"{type(error).__name__}: {error}"
            if operation.session is not None:
                operation.session.report_failure(operation.kind, error)
        accepted_at = operation.accepted_at or now
        waited_s = now - accepted_at
        step = events.StepEvent(
            operation.kind, operation.model_id, operation.seq_id or 0, operation.request_id or "", error is None,
            now - operation.created_at, accepted_at - operation.created_at, min(operation.queue_s, waited_s),
            max(waited_s - operation.queue_s - operation.fetch_s, 0.0), operation.fetch_s,
            "" if error is None else type(error).__name__, operation.number, operation.usage, operation.metrics,
            operation.session_id, str(operation.error or ""),
        )  # fmt: skip
        self.stats.count_step(step)
        tracing.end(operation, step)
        if events.wanted("step"):
            events.emit("step", step)

    def _tick(self) -> None:
        """Once a minute: log one line for each kind of operation that has waited that long.

        What the service does not accept yet has its own line: it is never the oldest of its kind while others run.
        """
        self._ticker = None
        if not self.in_flight:
            return
        now = self.clock.now()
        waiting: dict[tuple[str, bool], list[Operation]] = {}
        for operation in self.in_flight.values():
            if now - operation.waiting_since >= self.config.wait_line_s:
                waiting.setdefault((operation.kind, bool(operation.put_off_reason)), []).append(operation)
        for operations in waiting.values():
            oldest = min(operations, key=lambda operation: operation.waiting_since)
            more = f" (and {len(operations) - 1} more)" if len(operations) > 1 else ""
            # A warning, so that it is seen without any logging set-up: silence is what users complain about most.
            log.warning("%s%s", oldest.waiting_line(now), more)
        self._wake_ticker()

    def _wake_ticker(self) -> None:
        # In an empty context: the lines are about all operations, not about the one that happened to come first.
        context = contextvars.Context()
        self._ticker = self.loop.loop.call_later(self.config.wait_line_s, self._tick, context=context)


_links: ProcessRegistry[Config, ServiceLink] = ProcessRegistry()


def link_for(config: Config) -> ServiceLink:
    """Return the one link of this configuration in this process."""
    return _links.get(config, lambda: ServiceLink(config))
