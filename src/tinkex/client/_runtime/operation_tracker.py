"""Runs the operations of one link: each begins once, ends once, settles its future and is reported meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tinkex import events
from tinkex.client._runtime import tracing
from tinkex.client._runtime.loop import LoopThread
from tinkex.client._runtime.operation import Operation
from tinkex.client._runtime.stats import Stats
from tinkex.client.future import APIFuture, reject, resolve
from tinkex.clock import Clock
from tinkex.errors import ClosedError, DeadlineExceeded, TinkexError
from tinkex.settings import Config

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]
log = logging.getLogger("tinkex.wait")


class OperationTracker:
    """Starts operations from any thread; everything else happens on the loop thread."""

    def __init__(self, config: Config, loop: LoopThread, clock: Clock, stats: Stats) -> None:
        self._loop = loop
        self._clock = clock
        self._stats = stats
        self._deadline_s = config.deadline_s
        self._wait_line_s = config.wait_line_s
        self._host = urlsplit(config.base_url).hostname or ""
        self._ticker: asyncio.TimerHandle | None = None
        self.in_flight: dict[int, Operation] = {}

    def run(self, operation: Operation, work: Work[T], deadline_s: float | None = None) -> APIFuture[T]:
        """Start an operation from any thread; its future ends with the work, the deadline or the process."""
        future: APIFuture[T] = APIFuture(operation)
        operation.future = future
        # The caller's context travels along, so that its trace and log context are those of the request.
        self._loop.post(self._start_unless_cancelled, operation, future, work, deadline_s, contextvars.copy_context())
        return future

    def _start_unless_cancelled(
        self,
        operation: Operation,
        future: APIFuture[T],
        work: Work[T],
        deadline_s: float | None,
        context: contextvars.Context,
    ) -> None:
        if not future.cancelled():
            self.start(operation, future, work, context, deadline_s)

    def start(
        self,
        operation: Operation,
        future: APIFuture[T],
        work: Work[T],
        context: contextvars.Context,
        deadline_s: float | None = None,
    ) -> None:
        """Run an operation in its own task, in this context. Loop thread."""
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        task = self._loop.spawn(self._drive(operation, future, work, limit_s), context)
        future.add_done_callback(lambda done: self._loop.cancel(task) if done.cancelled() else None)

    async def _drive(self, operation: Operation, future: APIFuture[T], work: Work[T], deadline_s: float) -> None:
        """Run one operation to its end and settle its future, whatever happens."""
        self._begin(operation)
        error: BaseException | None = None
        try:
            async with asyncio.timeout(deadline_s):
                value = await work()
            if events.wanted("step"):
                operation.learn(value)
        except TimeoutError as caught:
            error = caught if isinstance(caught, DeadlineExceeded) else DeadlineExceeded(
                f"Gave up after {deadline_s:.0f} s: {operation.waiting_line(self._clock.now())}. "
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

    def announce(self, operation: Operation) -> None:
        """Emit the `start` event: what a client was asked to do, before any of it is sent."""
        if events.wanted("start"):
            started = events.StartEvent(
                operation.kind, operation.model_id, operation.number, operation.usage, operation.session_id
            )
            events.emit("start", started)

    def _begin(self, operation: Operation) -> None:
        """Called in the operation's own context, a copy of the caller's."""
        self.in_flight[id(operation)] = operation
        tracing.begin(operation, self._host)
        if self._ticker is None:
            self._wake_ticker()

    def _end(self, operation: Operation, error: BaseException | None) -> None:
        del self.in_flight[id(operation)]
        now = self._clock.now()
        if operation.future is not None and operation.future.cancelled():
            operation.state = "cancelled"
        else:
            operation.state = "done" if error is None else "failed"
        if error is not None:
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
            operation.session_id,
        )  # fmt: skip
        self._stats.count_step(step)
        tracing.end(operation, step)
        if events.wanted("step"):
            events.emit("step", step)

    def _tick(self) -> None:
        """Once a minute: log one line for each kind of operation that has waited that long."""
        self._ticker = None
        if not self.in_flight:
            return
        now = self._clock.now()
        oldest: dict[str, Operation] = {}
        count: dict[str, int] = {}
        for operation in self.in_flight.values():
            if now - operation.waiting_since >= self._wait_line_s:
                candidate = oldest.setdefault(operation.kind, operation)
                count[operation.kind] = count.get(operation.kind, 0) + 1
                if operation.waiting_since < candidate.waiting_since:
                    oldest[operation.kind] = operation
        for kind, operation in oldest.items():
            more = f" (and {count[kind] - 1} more)" if count[kind] > 1 else ""
            # A warning, so that it is seen without any logging set-up: silence is what users complain about most.
            log.warning("%s%s", operation.waiting_line(now), more)
        self._wake_ticker()

    def _wake_ticker(self) -> None:
        # In an empty context: the lines are about all operations, not about the one that happened to come first.
        context = contextvars.Context()
        self._ticker = self._loop.loop.call_later(self._wait_line_s, self._tick, context=context)
