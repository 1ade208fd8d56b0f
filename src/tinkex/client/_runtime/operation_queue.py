"""The queue of one training client. Sequence numbers are reserved on the caller's thread, under one lock with the
queueing: the order of calls is the order of numbers is the order of arrival, whatever thread or loop they come from.

An operation is a `QueuedCall`: it submits one or more requests while the turn is its own, and collects their results
after the turn has passed on. An operation that fails, is cancelled or runs out of time fails its own future and passes
its turn on; it cannot hold up the operations behind it.
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
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from tinkex.client._calls.submit import AcceptedRequest, Encode, submit
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import NO_METRICS, NO_USAGE, Operation, QueueObserver
from tinkex.client._runtime.session import Session
from tinkex.client.future import APIFuture
from tinkex.errors import ClosedError, WrongThread
from tinkex.events import Usage
from tinkex.wire.endpoints import Endpoint

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
log = logging.getLogger("tinkex.training")

inside_custom_loss = threading.local()
"""`.queue` is set in the worker thread that runs a user's loss: waiting there for the same queue would never end."""

_queues: weakref.WeakSet[OperationQueue] = weakref.WeakSet()


class QueuedCall(Protocol[T_co]):
    """What an operation does. Used once."""

    @property
    def request_count(self) -> int:
        """How many requests `submit` sends at most: that many sequence numbers are reserved."""

    async def submit(self, turn: Turn) -> None:
        """Send all requests through `turn`, each after the one before was accepted."""

    async def collect(self) -> T_co:
        """Wait for the results of what was submitted, and combine them."""


class Turn:
    """Held by an operation while it may submit."""

    def __init__(self, link: ServiceLink, operation: Operation, seq_ids: range) -> None:
        self._link = link
        self._operation = operation
        self.unsent = seq_ids
        """Numbers that no request has carried yet."""

    async def send(self, endpoint: Endpoint, encode: Encode, size_hint: int = 0) -> AcceptedRequest:
        """Submit the next request of this operation."""
        seq_id, self.unsent = self.unsent[0], self.unsent[1:]
        return await submit(self._link, self._operation, endpoint, seq_id, encode, size_hint)


class OperationQueue:
    """Lets the operations of one training client submit one after the other, in the order they were called."""

    def __init__(self, session: Session, model_id: str, first_seq_id: int, observer: QueueObserver) -> None:
        self._session = session
        self._observer = observer
        self.model_id = model_id
        self.next_seq_id = first_seq_id
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._unsent: set[int] = set()
        """Numbers that no request will carry, below one that is in use."""
        self._turns = asyncio.Lock()  # first come, first served; waiting operations can be cancelled
        self._unseen: deque[APIFuture[Any]] = deque(maxlen=16)
        _queues.add(self)

    def submit(
        self,
        kind: str,
        call: QueuedCall[T],
        *,
        usage: Usage = NO_USAGE,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> APIFuture[T]:
        """Queue an operation. Returns at once, from any thread.

        `usage`, and `metrics` that are known beforehand, are for its events.
        """
        self._check_may_submit(kind)
        link = self._session.link()
        self._report_unseen()
        operation = Operation(kind, link.clock.now(), model_id=self.model_id, session=self._session)
        operation.observers = (self._observer,)
        operation.usage, operation.metrics = usage, metrics
        future: APIFuture[T] = APIFuture(operation)
        operation.future = future
        link.operations.announce(operation)
        future.add_done_callback(self._note_unseen)
        context = contextvars.copy_context()
        with self._lock:
            seq_ids = range(self.next_seq_id, self.next_seq_id + call.request_count)
            self.next_seq_id = seq_ids.stop
            operation.seq_id = seq_ids.start

            async def work() -> T:
                return await self._run(Turn(link, operation, seq_ids), future, call)

            link.loop.post(link.operations.start, operation, future, work, context)
        return future

    def _check_may_submit(self, kind: str) -> None:
        if getattr(inside_custom_loss, "queue", None) is self:
            raise WrongThread(
                f"{kind} was called inside the custom loss of the same training client, which holds the queue until "
                "the loss returns. Call it after forward_backward_custom."
            )
        if self._pid != os.getpid():
            raise ClosedError(
                f"{kind}: this training client was made before a fork, and the parent process goes on with its "
                "sequence numbers. Use it there only, or make one here with create_training_client_from_state."
            )

    async def _run(self, turn: Turn, future: APIFuture[T], call: QueuedCall[T]) -> T:
        try:
            async with self._turns:
                if future.cancelled():  # on another thread, a moment ago: this task has not been cancelled yet
                    raise asyncio.CancelledError
                await call.submit(turn)
        except BaseException:
            self._give_back(turn.unsent)
            raise
        return await call.collect()

    def _give_back(self, unsent: range) -> None:
        """Return unsent numbers to the counter, as soon as no later one is in use: the service would wait for them."""
        with self._lock:
            self._unsent.update(unsent)
            while self.next_seq_id - 1 in self._unsent:
                self.next_seq_id -= 1
                self._unsent.remove(self.next_seq_id)

    def _note_unseen(self, future: APIFuture[Any]) -> None:
        if not future._is_observed and _error_of(future) is not None:
            self._unseen.append(future)

    def _report_unseen(self) -> None:
        """Log at the next call which futures failed unread: the usual cause of 'it hangs later' reports."""
        while True:
            try:
                future = self._unseen.popleft()
            except IndexError:  # empty; another thread may have taken the last one
                return
            if not future._is_observed:
                name, error = future._operation.name, _error_of(future)
                log.warning("%s failed and nobody has looked at its future: %s", name, error)


def _report_at_exit() -> None:
    for queue in list(_queues):
        queue._report_unseen()


atexit.register(_report_at_exit)


def _error_of(future: APIFuture[Any]) -> BaseException | None:
    """Return the error of a finished future, without marking it as seen."""
    return None if future.cancelled() else future._exception
