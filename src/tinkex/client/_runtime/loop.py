"""One event loop in one daemon thread per process: all I/O of the SDK runs there. A forked child gets a new one.

Work crosses threads through a `Mailbox`, which wakes the loop once for many calls: 10,000 submissions from another
thread cost one wake-up, not 10,000 writes to a socket.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tinkex.client._runtime.fork import after_fork_in_child
from tinkex.errors import TinkexError

T = TypeVar("T")
log = logging.getLogger("tinkex.loop")
EXIT_WAIT_S = 1.0
"""How long interpreter exit may wait for goodbyes (telemetry, session end)."""


class Mailbox:
    """Calls posted from any thread, run in order on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Mailboxes live in a weak-keyed map by loop: a strong reference here would keep every loop alive for ever.
        self._loop = weakref.ref(loop)
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def post(self, fn: Callable[..., object], *args: Any) -> bool:
        """Run `fn(*args)` on the loop soon. False when the loop is gone."""
        self._calls.append((fn, args))
        if self._is_woken:
            return True
        loop = self._loop()
        try:
            self._is_woken = True
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
                return True
        except RuntimeError:
            pass  # the loop was closed
        except BaseException:
            self._is_woken = False  # Ctrl-C before the loop was woken: the next call must wake it
            raise
        # Calls that cannot be delivered would keep the loop alive for ever.
        self._calls.clear()
        self._is_woken = False
        return False

    def _deliver(self) -> None:
        # Cleared before reading: a call that is posted now either is seen below or wakes the loop again.
        self._is_woken = False
        calls = self._calls
        while calls:
            fn, args = calls.popleft()
            try:
                fn(*args)
            except Exception:
                log.exception("A posted call failed")


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()
_mailboxes_lock = threading.Lock()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """Return the mailbox of any running loop, the user's included."""
    with _mailboxes_lock:
        box = _mailboxes.get(loop)
        if box is None:
            # A loop that was closed before its calls were delivered is kept alive by them.
            for closed in [each for each in _mailboxes if each.is_closed()]:
                del _mailboxes[closed]
            box = _mailboxes[loop] = Mailbox(loop)
        return box


async def in_thread(fn: Callable[[], T], name: str) -> T:
    """Run `fn()` on a new daemon thread, in the context of the awaiting task, and return its result.

    It blocks neither the loop nor the end of the interpreter.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    post = mailbox_of(loop).post
    context = contextvars.copy_context()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            setter(value)

    def work() -> None:
        try:
            value = context.run(fn)
        except BaseException as error:
            post(settle, outcome.set_exception, _safe_error(error))
        else:
            post(settle, outcome.set_result, value)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await outcome


def _safe_error(error: BaseException) -> Exception:
    """Return an error that may be raised on the loop: a SystemExit would end it, and futures reject a StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    stand_in = TinkexError(f"The function raised {type(error).__name__}({str(error)!r}) in its worker thread.")
    stand_in.__cause__ = error
    return stand_in


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of the standard library, whatever policy the program has set: that is about the user's loops.

    Other loops (uvloop) lack what `_http/dial.py` uses and do not survive a fork.
    """
    if sys.platform == "win32":
        return asyncio.ProactorEventLoop()
    return asyncio.SelectorEventLoop()


class LoopThread:
    """The SDK's own event loop, in a daemon thread."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self._mailbox = Mailbox(self.loop)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._goodbyes: dict[int, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.is_stopped = False
        """No operation that is still open will ever end."""
        self._thread = threading.Thread(target=self._run, name="tinkex-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt) as error:
                # From a user's callback. It would end this thread, not the program, and every other caller would hang.
                log.error("A callback on the SDK's loop raised %r: it cannot end the program from there.", error)

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def post(self, fn: Callable[..., object], *args: Any) -> None:
        """Run `fn(*args)` on the loop, after everything posted before by this thread."""
        self._mailbox.post(fn, *args)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task from any thread, one turn of the loop later: a task that was only just spawned must have begun,
        or it could not clean up after itself."""
        self.post(self.loop.call_soon, task.cancel)

    def spawn(
        self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """Start a task and own it until it ends. Loop thread only.

        Without a context it gets an empty one: work for all callers must not carry the trace of the first of them.
        """
        task = self.loop.create_task(coroutine, context=contextvars.Context() if context is None else context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A background task died", exc_info=error)

    def at_exit(self, owner: int, goodbye: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        """Register (or with None withdraw) what to do before the interpreter ends; all together get EXIT_WAIT_S."""
        if goodbye is None:
            self._goodbyes.pop(owner, None)
        else:
            self._goodbyes[owner] = goodbye

    def stop(self) -> None:
        """Run the goodbyes, cancel what runs, end the thread: bounded, whatever the service does."""
        if not self._thread.is_alive():
            return
        done = threading.Event()
        self.post(lambda: self.spawn(self._stop(done)))
        done.wait(EXIT_WAIT_S + 0.3)
        self.is_stopped = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(0.3)

    async def _stop(self, done: threading.Event) -> None:
        goodbyes = [asyncio.ensure_future(goodbye()) for goodbye in self._goodbyes.values()]
        if goodbyes:
            await asyncio.wait(goodbyes, timeout=EXIT_WAIT_S)
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=0.2)
        done.set()


_current: LoopThread | None = None
_parked: list[LoopThread] = []
_lock = threading.Lock()


def loop_thread() -> LoopThread:
    """Return the process's loop thread, started on first use."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = LoopThread()
    return _current


def on_own_loop() -> bool:
    """Return whether this is the loop thread: blocking here would wait for ourselves."""
    return _current is not None and _current.is_current


def has_stopped() -> bool:
    """Return whether the interpreter is ending and the loop with it: waiting now would never end."""
    return _current is not None and _current.is_stopped


def _forget() -> None:
    global _current, _lock, _mailboxes_lock
    if _current is not None:
        # The parent's loop shares its epoll with us. Closing or collecting it here would unregister the parent's own
        # wake-up, and run the clean-up of its tasks, so it is never freed and counts as closed.
        _parked.append(_current)
        _current.loop._closed = True  # type: ignore[attr-defined]
    _current = None
    _lock = threading.Lock()
    _mailboxes_lock = threading.Lock()


after_fork_in_child(_forget)


@atexit.register
def _exit() -> None:
    if _current is not None:
        _current.stop()
