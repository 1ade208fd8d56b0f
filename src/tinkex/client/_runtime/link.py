"""What all clients of one (base URL, key) share: transport, dialect, limits, server settings, operations in flight.

Obtained by `connection_for(config)` and in no other way. Pools and limits are keyed by (base URL, key): clients whose
settings differ only in, say, a timeout still share them. Lives as long as the process; a forked child makes its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tinkex import events
from tinkex._version import PROTOCOL_VERSION, __version__
from tinkex.client._calls.limits import limiter_for
from tinkex.client._http.transport import transport_for
from tinkex.client._runtime import tracing
from tinkex.client._runtime.auth import Auth
from tinkex.client._runtime.loop import LoopThread, after_fork_in_child, loop_thread
from tinkex.client._runtime.operation import Operation
from tinkex.client._runtime.stats import Stats
from tinkex.client.future import APIFuture, reject, resolve
from tinkex.clock import REAL, Clock
from tinkex.errors import APIConnectionError, APIError, ClosedError, DeadlineExceeded, NotFoundError, TinkexError
from tinkex.settings import Config
from tinkex.types import ClientConfigResponse, ClientDynamicConfigResponse
from tinkex.wire import endpoints, json_codec, requests
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Pool

T = TypeVar("T")
log = logging.getLogger("tinkex.wait")


class Connection:
    """Shared state towards one service. Attributes are written on the loop thread only."""

    def __init__(self, config: Config, clock: Clock = REAL) -> None:
        self.config = config
        self.clock = clock
        self.loop: LoopThread = loop_thread()
        self.transport = transport_for(config)
        self.auth = Auth(config)
        self.server = ClientConfigResponse()
        self.dynamic = ClientDynamicConfigResponse()
        self.dialect: Dialect | None = None
        self.is_proto_proven = False
        """Whether the service has taken a protobuf body; until then a refusal may mean it cannot read them."""
        self.limiter = limiter_for(*config.key)
        self.last_progress_at = self.last_heard_at = clock.now()
        self.stats = Stats()
        self.in_flight: dict[int, Operation] = {}
        self.context_lengths: dict[str, int] = {}
        """Model name → tokens, once the service has told."""
        self._idempotency = (f"tinkex-{uuid.uuid4().hex}", itertools.count())
        self._silence_said_at: float | None = None
        self._getting_ready: asyncio.Task[TinkexError | None] | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._host = urlsplit(config.base_url).hostname or ""
        self.base_headers = {
            "accept": "application/json",
            "user-agent": f"tinkex/{__version__}",
            **{name.lower(): value for name, value in config.headers.items()},
        }
        if config.cf_client_id and config.cf_client_secret:
            self.base_headers["cf-access-client-id"] = config.cf_client_id
            self.base_headers["cf-access-client-secret"] = config.cf_client_secret

    def idempotency_key(self) -> str:
        prefix, numbers = self._idempotency
        return f"{prefix}-{next(numbers)}"

    async def ready(self) -> Dialect:
        """Learn, once for all callers, which dialect the service speaks and what limits it sets."""
        if self.dialect is None:
            if self._getting_ready is None or self._getting_ready.done():
                self._getting_ready = self.loop.spawn(_quiet(self._learn()))
            # Shielded: one caller's cancellation must not stop the others' handshake.
            problem = await asyncio.shield(self._getting_ready)
            if problem is not None:
                raise problem
        assert self.dialect is not None
        return self.dialect

    async def _learn(self) -> None:
        from tinkex.client._calls.call import call

        operation = Operation("client_config", self.clock.now())
        body = requests.client_config(PROTOCOL_VERSION)
        try:
            answer = await call(self, endpoints.CLIENT_CONFIG, body, operation=operation)
        except NotFoundError:
            self.limiter.samples.count = self._most_samples()
            self.dialect = Dialect.JSON  # a service from before 0.18: JSON only, default limits
            return
        self.server = json_codec.read_content(ClientConfigResponse, answer.content)
        self.limiter.dispatch.limit_bytes = self.server.sample_dispatch_bytes_semaphore_size
        self.limiter.samples.count = self._most_samples()
        self.limiter.answers.limit_bytes = self.server.inflight_response_bytes_semaphore_size
        if self.server.pjwt_auth_enabled:
            await self.auth.start(self)
        try:
            answer = await call(self, endpoints.CLIENT_DYNAMIC_CONFIG, body, operation=operation, attempts=1)
            self.dynamic = json_codec.read_content(ClientDynamicConfigResponse, answer.content)
        except APIError:
            pass  # optional by design: its defaults switch everything off
        import tinkex.wire.proto_codec  # now, not on the first answer in the middle of a burst

        assert tinkex.wire.proto_codec
        self.dialect = Dialect.PROTO

    def _most_samples(self) -> int:
        """Without TLS there is no HTTP/2: a sample that waits occupies a connection, more could not be asked for."""
        most = self.server.sample_max_concurrent_requests
        if self.config.base_url.startswith("http:") and not self.server.sample_use_retrieve_futures:
            most = min(most, self.transport.limit_of(Pool.RETRIEVE_SAMPLES))
        return most

    @property
    def extensions(self) -> dict[str, Any]:
        """What our own service announces beyond the protocol ({} elsewhere)."""
        return self.server.tinkex or {}

    def run(
        self, operation: Operation, work: Callable[[], Coroutine[Any, Any, T]], deadline_s: float | None = None
    ) -> APIFuture[T]:
        """Start an operation from any thread; its future ends with the work, the deadline or the process."""
        future: APIFuture[T] = APIFuture(operation)
        operation.future = future
        # The caller's context travels along, so that its trace and log context are those of the request.
        self.loop.post(self._start, operation, future, work, deadline_s, contextvars.copy_context())
        return future

    def _start(
        self,
        operation: Operation,
        future: APIFuture[T],
        work: Callable[[], Coroutine[Any, Any, T]],
        deadline_s: float | None,
        context: contextvars.Context,
    ) -> None:
        if future.cancelled():
            return
        task = self.loop.spawn(self.drive(operation, future, work(), deadline_s), context)
        future.add_done_callback(lambda done: self.loop.cancel(task) if done.cancelled() else None)

    async def drive(
        self, operation: Operation, future: APIFuture[T], work: Coroutine[Any, Any, T], deadline_s: float | None = None
    ) -> None:
        """Run one operation to its end and settle its future, whatever happens."""
        self.begin(operation)
        error: BaseException | None = None
        limit_s = self.config.deadline_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit_s):
                value = await work
            if events.wanted("step"):
                operation.learn(value)
            self.end(operation, None)  # first, so that who has the result finds the status right
            resolve(future, value)
        except TimeoutError as problem:
            error = problem if isinstance(problem, DeadlineExceeded) else DeadlineExceeded(
                f"Gave up after {limit_s:.0f} s: {operation.waiting_line(self.clock.now())}. "
                "Raise deadline_s to wait longer."
            )  # fmt: skip
            reject(future, error)
        except asyncio.CancelledError:
            error = ClosedError(f"{operation.name} was still open when the client stopped.")
            if not future.done():
                reject(future, error)
        except Exception as problem:
            error = problem
            reject(future, problem)
        except (SystemExit, KeyboardInterrupt) as problem:  # from a callback of the user's: it would end the loop
            error = TinkexError(f"{operation.name}: a callback raised {problem!r} on the SDK's loop.")
            reject(future, error)
        finally:
            self.end(operation, error)

    def silent_s(self, operation: Operation) -> float:
        """How long the service has answered nothing but faults, as seen by this operation.

        Counted from before its own first attempt: what queued behind a dead service need not find out again.
        """
        return self.clock.now() - max(operation.created_at, self.last_heard_at)

    def say_unreachable(self, problem: APIError, attempt: int) -> None:
        """Once per silence, at a third attempt: a wrong address or a dead service must not look like a slow one."""
        if attempt < 3 or not isinstance(problem, APIConnectionError) or self._silence_said_at == self.last_heard_at:
            return
        self._silence_said_at = self.last_heard_at
        reason = str(problem).rstrip(".")
        log.warning("No answer from %s (%s). Trying on; `tinkex doctor` finds out why.", self.config.base_url, reason)

    def announce(self, operation: Operation) -> None:
        """Tell listeners what a client was told to do, before any of it is on its way."""
        if events.wanted("start"):
            started = events.StartEvent(
                operation.kind, operation.model_id, operation.number, operation.usage, operation.session_id
            )
            events.emit("start", started)

    def begin(self, operation: Operation) -> None:
        """In the operation's own context, a copy of the caller's. Harmless if it has begun already."""
        self.in_flight[id(operation)] = operation
        tracing.begin(operation, self._host)
        if self._ticker is None:
            self._wake_ticker()

    def end(self, operation: Operation, error: BaseException | None) -> None:
        if self.in_flight.pop(id(operation), None) is None:
            return
        now = self.clock.now()
        if operation.future is not None and operation.future.cancelled():
            operation.state = "cancelled"
        else:
            operation.state = "done" if error is None else "failed"
        if error is not None:
            operation.last_error = f"{type(error).__name__}: {error}"
        if operation.is_part:
            return
        if error is not None and operation.session is not None:
            operation.session.failed(operation.kind, error)
        accepted_at = operation.accepted_at or now
        waited = now - accepted_at
        step = events.StepEvent(
            operation.kind, operation.model_id, operation.seq_id or 0, operation.request_id or "", error is None,
            now - operation.created_at, accepted_at - operation.created_at, min(operation.queue_s, waited),
            max(waited - operation.queue_s - operation.fetch_s, 0.0), operation.fetch_s,
            "" if error is None else type(error).__name__, operation.number, operation.usage, operation.metrics,
            operation.session_id,
        )  # fmt: skip
        self.stats.count_step(step)
        tracing.end(operation, step)
        if events.wanted("step"):
            events.emit("step", step)

    def _tick(self) -> None:
        """Once a minute: one line for each kind of operation that has waited that long."""
        self._ticker = None
        if not self.in_flight:
            return
        now = self.clock.now()
        oldest: dict[str, Operation] = {}
        count: dict[str, int] = {}
        for operation in self.in_flight.values():
            if operation.future is not None and now - operation.created_at >= self.config.wait_line_s:
                kept = oldest.setdefault(operation.kind, operation)
                count[operation.kind] = count.get(operation.kind, 0) + 1
                if operation.created_at < kept.created_at:
                    oldest[operation.kind] = operation
        for kind, operation in oldest.items():
            more = f" (and {count[kind] - 1} more)" if count[kind] > 1 else ""
            # A warning, so that it is seen without any logging set-up: silence is what users complain about most.
            log.warning("%s%s", operation.waiting_line(now), more)
        self._wake_ticker()

    def _wake_ticker(self) -> None:
        # In a context of its own: the lines are about everybody's work, not about that of whoever came first.
        context = contextvars.Context()
        self._ticker = self.loop.loop.call_later(self.config.wait_line_s, self._tick, context=context)


async def _quiet(work: Coroutine[Any, Any, None]) -> TinkexError | None:
    """Run shared work; hand its failure to those who wait instead of to the log."""
    try:
        await work
    except TinkexError as problem:
        return problem
    return None


_connections: dict[Config, Connection] = {}
_lock = threading.Lock()


def connection_for(config: Config) -> Connection:
    """The one connection of this configuration in this process."""
    connection = _connections.get(config)
    if connection is None:
        with _lock:
            connection = _connections.get(config)
            if connection is None:
                connection = _connections[config] = Connection(config)
    return connection


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _connections.clear()


after_fork_in_child(_forget)
