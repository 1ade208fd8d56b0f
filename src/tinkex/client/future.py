"""`APIFuture`: one object for every result. Block on it, await it, ask it, cancel it, give it callbacks.

It is a `concurrent.futures.Future`, so `asyncio.wrap_future`, executors and callbacks work. A waiter's timeout never
cancels the work. Any number of waiters, on any thread or loop, get the same result; nothing is polled twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinkex.client._runtime.loop import has_stopped, mailbox_of, on_own_loop
from tinkex.client._runtime.operation import FutureStatus, Operation
from tinkex.clock import REAL
from tinkex.errors import ClosedError, WrongThread

T = TypeVar("T")
V = TypeVar("V")
_CANCELLED = {
    "queued": "cancelled before it was sent; the service never saw it",
    "submitting": "cancelled while it was being sent; if the service has it already, it runs to completion",
    "accepted": "cancelled here; the service had it already and runs it to completion",
}


class APIFuture(concurrent.futures.Future[T], Generic[T]):
    """The result of an operation, now or later.

    >>> sampler = service.create_sampling_client(base_model="Qwen/Qwen3-8B")
    >>> future = sampler.compute_logprobs(tinkex.ModelInput.from_ints([1, 2, 3]))
    >>> len(future.result(timeout=60))  # or `await future`
    3
    >>> future.done()
    True
    """

    def __init__(self, operation: Operation | None = None) -> None:
        super().__init__()
        self._operation = operation or Operation("call", REAL.now())
        self._pid = os.getpid()
        self._is_observed = False

    def result(self, timeout: float | None = None) -> T:
        """Block until the result is there and return it, or raise its error. A timeout leaves the work going."""
        return self._block(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._block(super().exception, timeout)

    def _block(self, wait: Callable[[float | None], V], timeout: float | None) -> V:
        self._is_observed = True
        if self._is_open:
            self._check_can_block()
        try:
            return wait(timeout)
        except TimeoutError:
            if not self._is_open:  # the operation's own error
                raise
            raise self._ran_out(timeout) from None

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the result; on timeout raises TimeoutError and leaves the work going."""
        if timeout is None:
            return await self
        try:
            async with asyncio.timeout(timeout):
                return await self
        except TimeoutError:
            if not self._is_open:  # the operation's own error
                raise
            raise self._ran_out(timeout) from None

    def __await__(self) -> Generator[Any, None, T]:
        self._is_observed = True
        if self._is_open:
            self._check_will_end()
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            post = mailbox_of(loop).post
            self.add_done_callback(lambda _: post(_wake, waiter))
            yield from waiter
        return super().result(0)

    def add_done_callback(self, fn: Callable[[APIFuture[T]], object]) -> None:
        """Call `fn(future)` when it is done, on the thread that settles it; it must be quick and must not block."""
        super().add_done_callback(fn)  # type: ignore[arg-type]

    def status(self) -> FutureStatus:
        """Return what is known about the operation right now; never blocks."""
        return self._operation.status(REAL.now())

    def cancel(self) -> bool:
        """Stop waiting for this operation; True if it was still open.

        Not sent yet: it never will be. Already accepted: the service runs it to completion (a sample may be stopped
        early where the service offers that). `status().note` says which it was.
        """
        operation = self._operation
        state = operation.state
        if not super().cancel():
            return False
        with self._condition:
            if self._state == "CANCELLED":
                self.set_running_or_notify_cancel()  # without it concurrent.futures.wait() would wait for ever
        operation.note = _CANCELLED.get(state, operation.note)
        operation.state = "cancelled"
        return True

    def on_queue_state(self, observer: Callable[[str, str | None], object]) -> APIFuture[T]:
        """Call `observer(state, reason)` on the loop thread whenever the service says why this operation waits."""
        self._operation.observers = (*self._operation.observers, observer)
        return self

    @property
    def _future(self) -> APIFuture[T]:
        # Programs written for the official package reach for this name.
        return self

    def future(self) -> APIFuture[T]:
        return self

    @property
    def _is_open(self) -> bool:
        # Read without the lock, which a forked child may have inherited in a locked state.
        return self._state in ("PENDING", "RUNNING")

    def _check_can_block(self) -> None:
        self._check_will_end()
        if on_own_loop():
            raise WrongThread(
                f"result() of {self._operation.name} was called on the SDK's own loop thread, which would have to "
                "bring it. Await the future, or wait on another thread."
            )

    def _check_will_end(self) -> None:
        if has_stopped():
            raise ClosedError(f"{self._operation.name}: the process is ending, and the SDK has stopped.")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self._operation.name} was submitted by the parent process before a fork; its result arrives there. "
                "Make the call again in this process."
            )

    def _ran_out(self, timeout: float | None) -> TimeoutError:
        line = self._operation.waiting_line(REAL.now())
        return TimeoutError(f"Not done within {timeout or 0:g} s: {line}. The work goes on; result() waits again.")

    if not TYPE_CHECKING:  # type checkers find this mistake by themselves, as long as they do not see this

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"'APIFuture' object has no attribute {name!r}: it is a future. Its result() gives the value, and so "
                "does `await`.",
                name=name,
                obj=self,
            )

    def __repr__(self) -> str:
        return f"<APIFuture {self._operation.name}: {self._operation.state}>"

    def __reduce__(self) -> Any:
        raise TypeError("A future belongs to its process and cannot be pickled: pickle its result().")


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def resolve(future: APIFuture[T], value: T) -> None:
    """Set a result unless the caller has cancelled meanwhile."""
    try:
        future.set_result(value)
    except concurrent.futures.InvalidStateError:
        pass


def reject(future: APIFuture[Any], error: BaseException) -> None:
    """Set an error unless the caller has cancelled meanwhile."""
    try:
        future.set_exception(error)
    except concurrent.futures.InvalidStateError:
        pass


def follow_up(future: APIFuture[Any]) -> APIFuture[Any]:
    """Return an open future of the same operation, for a value that is made of the first one's."""
    return APIFuture(future._operation)


def finished(value: T) -> APIFuture[T]:
    """Return a future that already has its value."""
    future: APIFuture[T] = APIFuture()
    future._operation.state = "done"
    future.set_result(value)
    return future
