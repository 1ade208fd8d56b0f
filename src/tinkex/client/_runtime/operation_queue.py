"""The queue of one training client. Sequence numbers are reserved on the caller's thread, under one lock with the
queueing: the order of calls is the order of numbers is the order of arrival, whatever thread or loop they come from.

An operation submits one or more requests while the turn is its own, and collects their results after the turn has
passed on. An operation that fails, is cancelled or runs out of time fails its own future and passes its turn on; it
cannot hold up the operations behind it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

from tinkex.client._calls.submit import Collect, Encode, submit
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import NO_METRICS, NO_USAGE, Operation, QueueObserver
from tinkex.client._runtime.session import Session
from tinkex.client.future import APIFuture
from tinkex.errors import ClosedError, WrongThread
from tinkex.events import Usage
from tinkex.wire.endpoints import Endpoint

T = TypeVar("T")
MOST_WATCHED = 1000
log = logging.getLogger("tinkex.training")


class Send(Protocol):
    """Submits the next request of an operation: its size in bytes, about, its datums if it is a pass, and its notes."""

    def __call__(
        self,
        endpoint: Endpoint,
        encode: Encode,
        size_hint: int,
        datums: int | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> Coroutine[Any, Any, Collect]: ...


Turn = AbstractAsyncContextManager[Send]
"""Waits until the operation may submit, and lets the next one submit when it is left."""

inside_custom_loss = threading.local()
"""`.queue` is set in the worker thread that runs a user's loss: waiting there for the same queue would never end."""

_queues: weakref.WeakSet[OperationQueue] = weakref.WeakSet()


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
        self._watched: dict[int, Operation] = {}
        """Operations that are open, or failed and nobody has read their future."""
        _queues.add(self)

    def submit(
        self,
        kind: str,
        request_count: int,
        work: Callable[[Turn], Coroutine[Any, Any, T]],
        *,
        usage: Usage = NO_USAGE,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> APIFuture[T]:
        """Queue an operation that sends at most so many requests. Returns at once, from any thread.

        `usage`, and `metrics` that are known beforehand, are for its events.
        """
        self._check_may_submit(kind)
        link = self._session.link()
        self._report_unseen()
        operation = Operation(
            kind,
            link.clock.now(),
            model_id=self.model_id,
            session=self._session,
            usage=usage,
            metrics=metrics,
            observers=(self._observer,),
        )
        link.announce(operation)
        self._watched[operation.number] = operation
        with self._lock:
            seq_ids = range(self.next_seq_id, self.next_seq_id + request_count)
            self.next_seq_id = seq_ids.stop
            operation.seq_id = seq_ids.start
            turn = self._turn(link, operation, list(seq_ids))
            future = link.run(operation, lambda: work(turn), begins_cancelled=True)
        future.add_done_callback(self._note_unseen)
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

    @asynccontextmanager
    async def _turn(self, link: ServiceLink, operation: Operation, unsent: list[int]) -> AsyncIterator[Send]:
        async def send(
            endpoint: Endpoint,
            encode: Encode,
            size_hint: int,
            datums: int | None = None,
            notes: Mapping[str, str] | None = None,
        ) -> Collect:
            return await submit(link, operation, endpoint, unsent.pop(0), encode, size_hint, datums, notes)

        try:
            async with self._turns:
                if operation.is_cancelled:  # on another thread, a moment ago: this task has not been cancelled yet
                    raise asyncio.CancelledError
                yield send
        except BaseException:
            self._give_back(unsent)
            raise

    def _give_back(self, unsent: list[int]) -> None:
        """Return unsent numbers to the counter, as soon as no later one is in use: the service would wait for them."""
        with self._lock:
            self._unsent.update(unsent)
            while self.next_seq_id - 1 in self._unsent:
                self.next_seq_id -= 1
                self._unsent.remove(self.next_seq_id)

    def take_failure(self) -> tuple[Operation, BaseException] | None:
        """Return the first failed operation whose future nobody has read, once, and its error. From any thread."""
        for operation in list(self._watched.values()):
            future, error = operation.future, operation.error
            if error is not None and isinstance(future, APIFuture):
                self._watched.pop(operation.number, None)
                if not future._is_observed:
                    future._is_observed = True
                    return operation, error
        return None

    def _note_unseen(self, future: APIFuture[Any]) -> None:
        if future._is_observed or _error_of(future) is None:
            self._watched.pop(future._operation.number, None)
            return
        self._unseen.append(future)
        while len(self._watched) > MOST_WATCHED:  # of failures that nobody reads
            self._watched.pop(next(iter(self._watched)), None)

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


@atexit.register
def _report_at_exit() -> None:
    for queue in list(_queues):
        queue._report_unseen()


def _error_of(future: APIFuture[Any]) -> BaseException | None:
    """Return the error of a finished future, without marking it as seen."""
    return None if future.cancelled() else future._exception
