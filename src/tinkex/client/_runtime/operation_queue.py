"""A training client's queue. Sequence numbers are reserved on the caller's thread, under one lock with the queueing:
the order of calls is the order of numbers is the order of arrival, whatever thread or loop they come from.

An operation is a *program*: a coroutine that submits one or more requests through `Turn.send` while the lane is its
own, and returns a coroutine that waits for the results after the lane has gone on. A program that fails, is cancelled
or runs out of time fails its own future and gives its turn on; it cannot hold up the operations behind it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from tinkex.client._calls.submit import submit
from tinkex.client._runtime.link import Connection
from tinkex.client._runtime.operation import NO_METRICS, NO_USAGE, Operation, QueueObserver
from tinkex.client._runtime.session import Session
from tinkex.client.future import APIFuture, reject
from tinkex.errors import ClosedError, DeadlineExceeded, WrongThread
from tinkex.events import Usage
from tinkex.wire.body import Body
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

T = TypeVar("T")
log = logging.getLogger("tinkex.training")
Completion = Coroutine[Any, Any, T]
Program = Callable[["Turn"], Coroutine[Any, Any, Completion[T]]]

inside_custom_loss = threading.local()
"""`.lane` is set in the worker thread that runs a user's loss: waiting there for the same lane would never end."""


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


class Turn:
    """What a program holds while the lane is its own."""

    def __init__(self, connection: Connection, operation: Operation, seq_ids: range) -> None:
        self.connection = connection
        self.operation = operation
        self.unsent = seq_ids
        """Numbers that no request has carried yet."""

    async def send(
        self, endpoint: Endpoint, encode: Callable[[int, Dialect], Body], size_hint: int = 0
    ) -> Coroutine[Any, Any, Any]:
        """Submit the next request of this operation; returns a coroutine that waits for its result."""
        seq_id, self.unsent = self.unsent[0], self.unsent[1:]
        return await submit(self.connection, self.operation, endpoint, seq_id, encode, size_hint)


class Entry(NamedTuple):
    """An operation that waits for its turn. `context` is a copy of the caller's: the operation runs in it."""

    operation: Operation
    future: APIFuture[Any]
    program: Program[Any]
    seq_ids: range
    context: contextvars.Context


class Lane:
    """One per training client."""

    def __init__(self, session: Session, model_id: str, first_seq_id: int, observer: QueueObserver) -> None:
        self._session = session
        self._observer = observer
        self.model_id = model_id
        self.next_seq_id = first_seq_id
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: deque[Entry] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._unseen: deque[APIFuture[Any]] = deque(maxlen=16)
        _lanes.add(self)

    def submit(
        self,
        kind: str,
        program: Program[T],
        count: int = 1,
        *,
        usage: Usage = NO_USAGE,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> APIFuture[T]:
        """Queue an operation that will send `count` requests. Returns at once, from any thread.

        `usage`, and `metrics` that are known beforehand, are for its events.
        """
        if getattr(inside_custom_loss, "lane", None) is self:
            raise WrongThread(
                f"{kind} was called inside the custom loss of the same training client, which holds the queue until "
                "the loss returns. Call it after forward_backward_custom."
            )
        if self._pid != os.getpid():
            raise ClosedError(
                f"{kind}: this training client was made before a fork, and the parent process goes on with its "
                "sequence numbers. Use it there only, or make one here with create_training_client_from_state."
            )
        connection = self._session.connect()
        self._report_unseen()
        operation = Operation(kind, connection.clock.now(), model_id=self.model_id, session=self._session)
        operation.observers = (self._observer,)
        operation.usage, operation.metrics = usage, metrics
        future: APIFuture[T] = APIFuture(operation)
        operation.future = future
        connection.announce(operation)
        with self._lock:
            seq_ids = range(self.next_seq_id, self.next_seq_id + count)
            self.next_seq_id += count
            operation.seq_id = seq_ids.start
            entry = Entry(operation, future, program, seq_ids, contextvars.copy_context())
            connection.loop.post(self._enqueue, connection, entry)
        return future

    def _enqueue(self, connection: Connection, entry: Entry) -> None:
        entry.context.run(connection.begin, entry.operation)
        self._queue.append(entry)
        if self._worker is None or self._worker.done():
            self._worker = connection.loop.spawn(self._work(connection))

    async def _work(self, connection: Connection) -> None:
        while self._queue:
            entry = self._queue.popleft()
            if entry.future.cancelled():
                self._give_back(entry.seq_ids)
                entry.context.run(connection.end, entry.operation, ClosedError("cancelled before it was sent"))
                continue
            await self._take_turn(connection, entry)

    async def _take_turn(self, connection: Connection, entry: Entry) -> None:
        operation, future, program, seq_ids, context = entry
        left_s = connection.config.deadline_s - (connection.clock.now() - operation.created_at)
        # A task of its own, so that cancelling the operation ends the turn and not the lane.
        held = Turn(connection, operation, seq_ids)
        turn = connection.loop.loop.create_task(program(held), context=context)
        future.add_done_callback(lambda done: connection.loop.cancel(turn) if done.cancelled() else None)
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                completion = await turn
        except Exception as problem:
            self._give_back(held.unsent)
            if isinstance(problem, TimeoutError) and not isinstance(problem, DeadlineExceeded):
                problem = DeadlineExceeded(
                    f"Gave up after {connection.config.deadline_s:.0f} s: "
                    f"{operation.waiting_line(connection.clock.now())}."
                )
            context.run(self._fail, connection, operation, future, problem)
            return
        except asyncio.CancelledError:
            self._give_back(held.unsent)
            if future.cancelled() and turn.cancelled():
                context.run(connection.end, operation, ClosedError("cancelled during its turn"))
                return
            stopping = ClosedError(f"{operation.name}: the process is stopping.")
            context.run(self._fail, connection, operation, future, stopping)
            raise
        left_s = connection.config.deadline_s - (connection.clock.now() - operation.created_at)
        task = connection.loop.spawn(connection.drive(operation, future, completion, max(left_s, 0.0)), context)
        future.add_done_callback(lambda done: self._settled(connection, done, task))

    def _give_back(self, unsent: range) -> None:
        """Numbers that never left, if no later ones are taken: a service waits for a missing one before it goes on."""
        with self._lock:
            if unsent and self.next_seq_id == unsent.stop:
                self.next_seq_id = unsent.start

    def _settled(self, connection: Connection, future: APIFuture[Any], task: asyncio.Task[None]) -> None:
        if future.cancelled():
            connection.loop.cancel(task)
        elif not future._is_observed and concurrent_error(future) is not None:
            self._unseen.append(future)

    def _fail(
        self, connection: Connection, operation: Operation, future: APIFuture[Any], problem: BaseException
    ) -> None:
        reject(future, problem)
        if not future._is_observed and not future.cancelled():
            self._unseen.append(future)
        connection.end(operation, problem)

    def _report_unseen(self) -> None:
        """Say at the next call what failed without anybody looking: the usual cause of 'it hangs later' reports."""
        while True:
            try:
                future = self._unseen.popleft()
            except IndexError:  # empty; another thread may have taken the last one
                return
            if not future._is_observed:
                name, problem = future._operation.name, concurrent_error(future)
                log.warning("%s failed and nobody has looked at its future: %s", name, problem)


def _report_at_exit() -> None:
    for lane in list(_lanes):
        lane._report_unseen()


atexit.register(_report_at_exit)


def concurrent_error(future: APIFuture[Any]) -> BaseException | None:
    """The error of a finished future, without marking it as seen."""
    return None if future.cancelled() else future._exception
