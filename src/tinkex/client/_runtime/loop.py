"""One event loop in one daemon thread per process: all I/O of the SDK runs there. A forked child gets a new one.

Work crosses threads through a `Mailbox`, which wakes the loop once for many letters: 10,000 submissions from another
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
from typing import Any

from tinkex.client._runtime.fork import after_fork_in_child

log = logging.getLogger("tinkex.loop")
EXIT_WAIT_S = 1.0
"""How long interpreter exit may wait for goodbyes (telemetry, session end)."""


class Mailbox:
    """Calls posted from any thread, run in order on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Mailboxes live in a weak-keyed map by loop: a strong reference here would keep every loop alive for ever.
        self._loop = weakref.ref(loop)
        self._letters: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def post(self, fn: Callable[..., object], *args: Any) -> bool:
        """Run `fn(*args)` on the loop soon. False when the loop is gone."""
        self._letters.append((fn, args))
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
            self._is_woken = False  # Ctrl-C before the loop heard: the next letter must wake it
            raise
        # Nobody is left to care; undelivered letters would keep the loop alive for ever.
        self._letters.clear()
        self._is_woken = False
        return False

    def _deliver(self) -> None:
        # Cleared before reading: a letter that arrives now either is seen below or wakes the loop again.
        self._is_woken = False
        letters = self._letters
        while letters:
            fn, args = letters.popleft()
            try:
                fn(*args)
            except Exception:
                log.exception("A posted call failed")


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()
_mailboxes_lock = threading.Lock()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """The mailbox of any running loop, the user's included."""
    with _mailboxes_lock:
        box = _mailboxes.get(loop)
        if box is None:
            # A loop that was closed before its letters were delivered is held by them.
            for closed in [kept for kept in _mailboxes if kept.is_closed()]:
                del _mailboxes[closed]
            box = _mailboxes[loop] = Mailbox(loop)
        return box


def _new_loop() -> asyncio.AbstractEventLoop:
    """The standard library's own loop, whatever policy the program has set: a uvloop policy is about the user's loops.

    Other loops lack what `_dial` uses and do not survive a fork.
    """
    if sys.platform == "win32":
        return asyncio.ProactorEventLoop()
    return asyncio.SelectorEventLoop()


class LoopThread:
    """The SDK's own loop."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self._mailbox = Mailbox(self.loop)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._goodbyes: dict[int, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.is_stopped = False
        """Nothing that is still open will ever end."""
        self._thread = threading.Thread(target=self._run, name="tinkex-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt) as problem:
                # From a callback of the user's. It would end this thread, not the program, and hang every other caller.
                log.error("A callback on the SDK's loop raised %r: it cannot end the program from there.", problem)

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def post(self, fn: Callable[..., object], *args: Any) -> None:
        """Run `fn(*args)` on the loop, after everything posted before by this thread."""
        self._mailbox.post(fn, *args)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task from any thread, one turn of the loop later: one that was only just spawned must have begun, or
        it could not clean up after itself."""
        self.post(self.loop.call_soon, task.cancel)

    def spawn(
        self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """Start a task and own it until it ends. Loop thread only.

        Without a context it gets an empty one: what serves everybody must not carry the trace of whoever came first.
        """
        task = self.loop.create_task(coroutine, context=contextvars.Context() if context is None else context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("A background task died", exc_info=problem)

    def at_exit(self, owner: int, goodbye: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        """Register (or with None withdraw) what to say before the interpreter ends; all together get EXIT_WAIT_S."""
        if goodbye is None:
            self._goodbyes.pop(owner, None)
        else:
            self._goodbyes[owner] = goodbye

    def stop(self) -> None:
        """Say goodbye, cancel what runs, end the thread: bounded, whatever the service does."""
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
    """The process's loop thread, started on first use."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = LoopThread()
    return _current


def on_own_loop() -> bool:
    """Whether this is the loop thread: blocking here would wait for ourselves."""
    return _current is not None and _current.is_current


def has_stopped() -> bool:
    """Whether the interpreter is ending and the loop with it: who waits now would wait for ever."""
    return _current is not None and _current.is_stopped


def _forget() -> None:
    global _current, _lock, _mailboxes_lock
    if _current is not None:
        # The parent's loop shares its epoll with us. Closing or collecting it here would unregister the parent's own
        # wake-up, and run the clean-up of its tasks, so it is kept for good and counts as closed.
        _parked.append(_current)
        _current.loop._closed = True  # type: ignore[attr-defined]
    _current = None
    _lock = threading.Lock()
    _mailboxes_lock = threading.Lock()


def _exit() -> None:
    if _current is not None:
        _current.stop()


after_fork_in_child(_forget)
atexit.register(_exit)
