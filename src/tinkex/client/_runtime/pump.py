"""`Pump`: one operation that brings many values, read as they come, from any thread or event loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, Generic, TypeVar

from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.loop import mailbox_of, on_own_loop
from tinkex.client._runtime.operation import Operation
from tinkex.client.future import APIFuture
from tinkex.errors import WrongThread

T = TypeVar("T")
Receive = Callable[[Callable[[T], None]], Coroutine[Any, Any, object]]
"""Receives values until there are no more, and calls the function it gets with each. Runs on the loop thread."""
LOOK_S = 0.1
"""How soon Ctrl-C is noticed where a wait for a queue cannot be interrupted (Windows)."""
_END: Final = object()
"""Comes after the last value."""


class Pump(Generic[T]):
    """Reads ahead without a bound: what one sample or one reply brings fits into memory, and comes whole at its end.

    Read with `for` or `async for`, once. The operation begins with the reading. Leaving early (`break`, Ctrl-C, an
    error, garbage collection of the iterator) cancels it, which closes its connection: the service stops too.
    """

    def __init__(self, link: ServiceLink, operation: Operation, receive: Receive[T]) -> None:
        self._link = link
        self._operation = operation
        self._receive = receive
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._notify: Callable[[], object] = lambda: None
        self._has_values = False

    def __iter__(self) -> Iterator[T]:
        if on_own_loop():
            raise WrongThread("A stream cannot be read on the SDK's own loop thread.")
        return self._read()

    def _read(self) -> Iterator[T]:
        future = self._start()
        try:
            while True:
                try:
                    value = self._arrived.get(timeout=LOOK_S)
                except queue.Empty:
                    future._check_will_end()  # not after a fork, nor when the interpreter is ending
                    continue
                if value is _END:
                    future.result()  # raises what ended it
                    return
                yield value
        finally:
            self._leave(future)

    async def __aiter__(self) -> AsyncIterator[T]:
        news = asyncio.Event()
        post = mailbox_of(asyncio.get_running_loop()).post
        self._notify = lambda: post(news.set)
        future = self._start()
        try:
            while True:
                news.clear()  # before the queue is read: what arrives from now on sets it again
                while not self._arrived.empty():
                    value = self._arrived.get_nowait()
                    if value is _END:
                        await future  # raises what ended it
                        return
                    yield value
                if not future.done():
                    future._check_will_end()
                await news.wait()
        finally:
            self._leave(future)

    def _leave(self, future: APIFuture[object]) -> None:
        """Cancel what is still open. Once a value has come the operation counts as done, with its cost."""
        self._operation.is_left_early = self._has_values and not future.done()
        future.cancel()

    def _start(self) -> APIFuture[object]:
        future = self._link.run(self._operation, lambda: self._receive(self._put))
        future.add_done_callback(lambda _: self._put(_END))
        return future

    def _put(self, value: Any) -> None:
        self._operation.waiting_since = self._link.clock.now()
        self._has_values = self._has_values or value is not _END
        self._arrived.put(value)
        self._notify()
