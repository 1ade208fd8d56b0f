"""The record of one schedule: calls, their outcomes, what passed the proxy, what was broken, and the final state.

Values are plain (text, numbers, lists, dicts), so that histories can be compared, printed and written by hand in tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Value = Any
"""What JSON can hold. Floats are kept as hexadecimal text: equal means equal to the bit."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a tenant's program and how it ended. No outcome at all: the future was never answered."""

    tenant: str
    index: int
    what: str
    began_s: float
    ended_s: float | None = None
    value: Value = None
    error: str | None = None

    @property
    def is_answered(self) -> bool:
        return self.ended_s is not None


@dataclass(frozen=True, kw_only=True)
class Intrusion:
    """An attempt to reach what belongs to another tenant, and what came of it."""

    tenant: str
    owner: str
    what: str
    was_given: bool
    outcome: str


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """Something that was broken, from when until when."""

    what: str
    began_s: float
    ended_s: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """How long after a fault the last tenant went on."""

    what: str
    seconds: float
    most_s: float
    """How long it may take."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A callback that held an event loop."""

    loop: str
    began_s: float
    seconds: float
    """By the clock: with what the machine did meanwhile for other processes."""
    cpu_s: float
    """Of the loop's own thread: with what it computed alone."""
    what: str


@dataclass(frozen=True, kw_only=True)
class FinalRun:
    """What the service says about a tenant's run when all is quiet again, and what its checkpoints hold."""

    tenant: str
    steps: list[Value]
    """Optimizer steps in the order of the journal: their sequence number and loss."""
    checkpoints: dict[str, str]
    """Name → digest of the tensors that were downloaded; an error's text where that failed."""
    listed: list[str]
    """The names that the service lists."""
    failed_operations: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class History:
    """Everything that was seen. Appended to from several threads."""

    calls: list[Call] = field(default_factory=list)
    intrusions: list[Intrusion] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    """Responses in which the proxy saw another tenant's id, each as a sentence."""
    faults: list[FaultRecord] = field(default_factory=list)
    resumptions: list[Resumption] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """What the service did because of the faults, by name, for the summary."""
    stalls: list[Stall] = field(default_factory=list)
    finals: list[FinalRun] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    """What was still there after close(), each as a sentence."""
    crashes: list[str] = field(default_factory=list)
    """Ends of a process that nobody caused, and other errors of the service itself, each as a sentence."""
    load_per_core: float = 0.0
    """Processes that wanted to run on each core of the machine, on average over the last minute."""
    saved: dict[str, list[str]] = field(default_factory=dict)
    """Tenant → the names of the checkpoints that were acknowledged."""


class Recorder:
    """Writes a history, with seconds since its own start."""

    def __init__(self) -> None:
        self.history = History()
        self.began = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        """The timeline, for people."""
        self._lock = threading.Lock()

    def now(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        with self._lock:
            self.lines.append((self.now(), text))

    def call(self, tenant: str, index: int, what: str, work: Callable[[], Value]) -> Value:
        """Do one call and record it. Its error is recorded and raised."""
        began_s = self.now()
        value, error, is_answered = None, None, True
        try:
            value = work()
            return value
        except Unanswered as caught:
            is_answered, error = False, str(caught)
            raise
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            raise
        finally:
            ended_s = self.now() if is_answered else None
            call = Call(
                tenant=tenant, index=index, what=what, began_s=began_s, ended_s=ended_s, value=value, error=error
            )
            with self._lock:
                self.history.calls.append(call)
            self.say(f"{tenant} {index:2d} {what}: {error or value}")

    def add(self, rows: list[Any], row: Any) -> None:
        with self._lock:
            rows.append(row)


class Unanswered(Exception):
    """A future that had no outcome when the deadline was over."""


def timeline(lines: list[tuple[float, str]]) -> str:
    return "\n".join(f"{at_s:7.3f} s  {text[:220]}" for at_s, text in sorted(lines))
