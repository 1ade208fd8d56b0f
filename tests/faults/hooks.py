"""Gives a forked server what `tinkex serve` has not: quick engines, a clock that can jump, a watch on its loop.

Installed after the fork and before the command runs. Nothing of the package is changed but `tinkex.clock`, which is its
only reader of time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinkex import clock

ENGINE_MODULE = "tinkex.engine.process.main"
PASSES_ALONE = "TESTS_PASSES_ALONE"
"""In the environment of a server: its engine computes each pass alone."""
OFFSET = struct.Struct("<d")
STALL_NOTED_S = 0.03
"""Callbacks that hold a loop longer than this are written down; the checker has the bounds."""
HOUSEKEEPING_S = (20.0, 60.0)
"""Sleeps of this length are those of the server's upkeep, every 30 s; a schedule takes a few seconds."""
UPKEEP_EVERY_S = 0.3
_forks_s = [0.0]
"""CPU time of forks by this process. They are the harness's own: a real server starts its engine by exec."""


def jump_clock(file: Path) -> None:
    """Let the seconds in `file` (one double) be added to wall time. Monotonic time never jumps, as in real systems."""
    with file.open("r+b") as opened:
        shared = mmap.mmap(opened.fileno(), OFFSET.size)

    def wall(self: clock.Clock) -> float:
        return time.time() + float(OFFSET.unpack_from(shared)[0])

    async def sleep(self: clock.Clock, seconds: float) -> None:
        is_upkeep = HOUSEKEEPING_S[0] <= seconds <= HOUSEKEEPING_S[1]
        await asyncio.sleep(UPKEEP_EVERY_S if is_upkeep else seconds)

    clock.Clock.wall = wall  # type: ignore[method-assign]
    clock.Clock.sleep = sleep  # type: ignore[method-assign]


def watch_loops(note: Callable[[dict[str, Any]], None]) -> None:
    """Call `note` for every callback that holds an event loop of this process for long.

    The time of day also passes while the machine runs other processes; the CPU time of the loop's own thread does not.
    """
    run = asyncio.events.Handle._run

    def timed_run(self: asyncio.events.Handle) -> None:
        began, began_cpu, began_forks = time.monotonic(), time.thread_time(), _forks_s[0]
        run(self)
        taken_s = time.monotonic() - began
        if taken_s > STALL_NOTED_S:
            cpu_s = time.thread_time() - began_cpu - (_forks_s[0] - began_forks)
            name = threading.current_thread().name
            note({"began": began, "seconds": taken_s, "cpu_s": cpu_s, "thread": name, "what": repr(self)})

    asyncio.events.Handle._run = timed_run  # type: ignore[method-assign]


def note_in(file: Path) -> Callable[[dict[str, Any]], None]:
    """Return a function that appends a line of JSON, which survives kill -9."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return lambda row: void(os.write(descriptor, json.dumps(row).encode() + b"\n"))


def void(_: object) -> None:
    """Drop a value."""


def fork_engines() -> None:
    """Start engines by fork instead of by exec: the modules they would import for seconds are here already.

    The child is a real one: same pipes, same parent, same exit codes, its own process and session.
    """
    fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]

    def start(*args: Any) -> int:
        words = [os.fsdecode(word) for word in args[0]]
        if ENGINE_MODULE not in words:
            return int(fork_exec(*args))
        # args[6:14]: p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, errpipe_read, errpipe_write
        stdin, stdout, stderr, errpipe = args[6], args[9], args[11], args[13]
        passed = [descriptor for descriptor in args[3] if descriptor != errpipe]
        began_cpu = time.thread_time()
        pid = os.fork()
        if pid == 0:
            _be_engine(words, stdin, stdout, stderr, passed)
        _forks_s[0] += time.thread_time() - began_cpu
        return pid

    subprocess._fork_exec = start  # type: ignore[attr-defined]


def _be_engine(words: list[str], stdin: int, stdout: int, stderr: int, passed: list[int]) -> None:
    """Run the engine's main function as `python -m` would. Never returns."""
    status = 1
    try:
        os.setsid()  # first: when its pipes close, below, the server takes it for started, and may kill its group
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for target, source in ((0, stdin), (1, stdout), (2, stderr)):
            os.dup2(source, target)
        for low, high in itertools.pairwise([2, *sorted(passed), 4096]):
            os.closerange(low + 1, high)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), mode) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
        sys.argv = words
        import logging

        logging.root.handlers.clear()
        logging.root.manager.loggerDict.clear()
        # The running loop is the server's: in this process there is none.
        asyncio.events._set_running_loop(None)
        if os.environ.get(PASSES_ALONE):
            _compute_passes_alone()
        from tinkex.engine.process import main

        main.main()
        status = 0
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _compute_passes_alone() -> None:
    """Never compute passes of several runs together: rounding depends on the company of a pass of a thousand tokens,
    and who shares an engine with whom depends on the faults."""
    from tinkex.engine.training import micro_batches, trainer

    def choose(passes: Sequence[Any], token_budget: int, runner: Any) -> list[Any]:
        return micro_batches.next_micro_batch(passes[:1], token_budget, runner)

    assert hasattr(trainer, "next_micro_batch"), "the trainer chooses in another way: tests/faults/hooks.py patches it"
    trainer.next_micro_batch = choose
