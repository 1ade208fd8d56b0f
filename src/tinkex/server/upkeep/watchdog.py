"""Measures how long the event loop is blocked, and by what.

All requests of a service run on one event loop: a call that does not return for a second is a second in which nobody
gets a response. A thread looks every few milliseconds whether the loop has moved. If it has not, it takes the stack of
the loop's thread, which names the line that blocks.

On a busy machine the loop also stands still because it gets no core. What its thread has computed meanwhile tells the
two apart: a stall has the cause `code` if that alone was long enough, else `waiting` (for a core, a lock, a disk).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Literal

from tinkex.clock import Clock, thread_cpu_s

logger = logging.getLogger("tinkex.server")

BEAT_S = 0.01
STALL_S = 0.05
"""A loop that does not move for so long is stalled."""
Cause = Literal["code", "waiting"]
MOST_CULPRITS = 100
"""Each line of code is logged once; this many of them."""


class Watchdog:
    """Watches the running loop between `start` and `stop`. `on_stall` gets the cause of a stall and its seconds."""

    def __init__(self, clock: Clock, on_stall: Callable[[Cause, float], None], stall_s: float = STALL_S) -> None:
        self._clock, self._on_stall, self._stall_s = clock, on_stall, stall_s
        self._beat, self._cpu_s = clock.now(), 0.0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tinkex-watchdog", daemon=True)
        self._loop_thread = 0
        self._timer: asyncio.TimerHandle | None = None
        self._logged: set[str] = set()

    def start(self) -> None:
        """Begin. Call it on the loop's thread."""
        self._loop_thread, self._cpu_s = threading.get_ident(), thread_cpu_s()
        self._pulse()
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join(1.0)

    def _pulse(self) -> None:
        """Show that the loop moves. Reports the stall that has just ended, if there was one."""
        now, cpu_s = self._clock.now(), thread_cpu_s()
        late_s, computed_s = now - self._beat - BEAT_S, cpu_s - self._cpu_s
        self._beat, self._cpu_s = now, cpu_s
        if late_s >= self._stall_s:
            self._on_stall("code" if computed_s >= self._stall_s else "waiting", late_s)
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._pulse)

    def _watch(self) -> None:
        caught = 0.0
        while not self._is_stopped.wait(BEAT_S):
            beat = self._beat
            if beat != caught and self._clock.now() - beat > self._stall_s + BEAT_S:
                caught = beat  # once for each stall
                self._log(sys._current_frames().get(self._loop_thread))

    def _log(self, frame: FrameType | None) -> None:
        """Log the innermost lines of our own that block the loop, once for each place."""
        stack = traceback.extract_stack(frame)
        ours = [f"{line.filename.rpartition('/tinkex/')[2]}:{line.lineno} {line.name}" for line in stack]
        ours = [line for line, full in zip(ours, stack, strict=True) if "/tinkex/" in full.filename][-3:]
        culprit = " → ".join(ours) or (f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place")
        if culprit not in self._logged and len(self._logged) < MOST_CULPRITS:
            self._logged.add(culprit)
            logger.warning("the event loop was blocked for more than %.0f ms in %s", self._stall_s * 1000, culprit)
