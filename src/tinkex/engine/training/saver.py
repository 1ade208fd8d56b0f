"""Writes adapters to files on a thread of its own, one after the other, while the engine works for others.

The thread reads the adapter's own memory: no copy is made, and commands of that adapter wait until it has been written.
While the engine computes, the thread pauses `PAUSE_PER_WORK` times as long as it worked: a pass uses all cores, and
ends when the slowest of them does. While the engine waits, the thread works without a pause.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Set

from tinkex.clock import REAL, thread_cpu_s
from tinkex.engine.frames import Frame

PAUSE_PER_WORK = 5.0
"""With it a pass of 125 ms gives about 20 ms of a core to the thread. A save of 545 MB takes 0.45 s of a core."""
FREE_S = 0.01
"""What every save may work without a pause: an adapter of rank 8 is written by then."""
_LEAST_WORK_S = 0.001
"""Shorter pauses would cost more than they give."""

Pace = Callable[[], None]
"""What a save calls after every block: it may wait."""
Saved = tuple[int, Frame | Exception]
"""A command's number, and its reply or the error that it raised."""


class Saver:
    """Holds the saves that wait, the one that runs, and those that are done. `on_done` is called on the thread."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = _nothing
        self.is_engine_busy = False
        """Whether the engine computes. Set by the engine's loop, read by the thread after every block."""
        self._names: set[str] = set()
        self._waiting: queue.SimpleQueue[tuple[int, str, Callable[[Pace], Frame]]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, Saved]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since_s = 0.0

    @property
    def names(self) -> Set[str]:
        """Adapters that are being written, or will be: their numbers must not change."""
        return self._names

    @property
    def has_done(self) -> bool:
        return not self._done.empty()

    def start(self, number: int, name: str, save: Callable[[Pace], Frame]) -> None:
        """Have the thread call `save`. The adapter of that name is busy until `take_done` has returned the reply."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, daemon=True, name="saver")
            thread.start()  # first: if it raises, nothing waits for the thread
            self._thread = thread
        self._names.add(name)
        self._waiting.put((number, name, save))

    def take_done(self) -> list[Saved]:
        """Return the replies of the saves that have ended."""
        replies: list[Saved] = []
        while self.has_done:
            name, saved = self._done.get()
            self._names.discard(name)
            replies.append(saved)
        return replies

    def _work(self) -> None:
        while True:
            number, name, save = self._waiting.get()
            self._since_s = thread_cpu_s() + FREE_S
            try:
                reply: Frame | Exception = save(self._pace)
            except Exception as error:
                reply = error
            del save  # it holds the adapter, which may be dropped as soon as the reply is taken
            self._done.put((name, (number, reply)))
            del reply  # an error has a trace, and the trace the adapter
            self.on_done()

    def _pace(self) -> None:
        worked_s = thread_cpu_s() - self._since_s
        if worked_s < _LEAST_WORK_S:
            return
        if self.is_engine_busy:
            # With several saves, as many runs wait for this thread: their parts of the engine's time are its own.
            REAL.pause(worked_s * PAUSE_PER_WORK / max(len(self._names), 1))
        self._since_s += worked_s


def _nothing() -> None:
    pass
