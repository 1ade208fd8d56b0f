"""The state of one operation in flight: read by `future.status()`, the waiting lines and the events."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Protocol

from tinkex.events import Usage

QueueObserver = Callable[[str, str | None], object]
NO_USAGE = Usage()
NO_METRICS: Mapping[str, float] = {}
_numbers = itertools.count(1)


class Owner(Protocol):
    """The session an operation belongs to; the operation keeps it alive."""

    @property
    def session_id(self) -> str | None: ...

    def state(self) -> str: ...

    def report_failure(self, operation: str, error: BaseException) -> None: ...


class FutureStatus(NamedTuple):
    """A snapshot. `state`: queued, submitting, accepted, done, failed, cancelled."""

    state: str
    operation: str
    seq_id: int | None
    request_id: str | None
    waited_s: float
    polls: int
    attempts: int
    queue_state: str | None
    queue_reason: str | None
    last_error: str | None
    note: str


@dataclass(slots=True, eq=False)
class Operation:
    """One call of the user, from the moment it is made to its end. Written on the loop thread, read anywhere."""

    kind: str
    created_at: float
    _: KW_ONLY
    seq_id: int | None = None
    model_id: str = ""
    session: Owner | None = None
    usage: Usage = NO_USAGE
    metrics: Mapping[str, float] = field(default_factory=lambda: NO_METRICS)
    observers: tuple[QueueObserver, ...] = ()
    number: int = field(default_factory=_numbers.__next__)
    state: str = "queued"
    last_response_at: float = field(init=False)
    waiting_since: float = field(init=False)
    """Since when the caller has nothing new: from the beginning, or from the last chunk of a stream."""
    is_left_early: bool = False
    """Whether its reader left after the first value: it is cancelled, and no failure."""
    accepted_at: float | None = None
    request_id: str | None = None
    polls: int = 0
    attempts: int = 0
    queue_state: str | None = None
    queue_reason: str | None = None
    queue_s: float = 0.0
    fetch_s: float = 0.0
    last_error: str | None = None
    error: BaseException | None = None
    """What it failed with, from its end on."""
    put_off_reason: str = ""
    """What the service says while it does not accept the request yet; empty otherwise."""
    note: str = ""
    future: concurrent.futures.Future[Any] | None = None
    span: Any = None
    """The OpenTelemetry span, while one is open."""

    def __post_init__(self) -> None:
        self.last_response_at = self.waiting_since = self.created_at

    @property
    def name(self) -> str:
        return self.kind if self.seq_id is None else f"{self.kind} seq {self.seq_id}"

    @property
    def is_cancelled(self) -> bool:
        return self.future is not None and self.future.cancelled()

    @property
    def session_id(self) -> str:
        return (self.session.session_id if self.session else None) or ""

    def learn(self, result: Any) -> None:
        """Note what events report of a result: its metrics, how many tokens were sampled."""
        if isinstance(metrics := getattr(result, "metrics", None), Mapping):
            self.metrics = {**self.metrics, **metrics}
        if sequences := getattr(result, "sequences", None):
            self.usage = self.usage._replace(sampled_tokens=sum(len(sequence.tokens) for sequence in sequences))

    def status(self, now: float) -> FutureStatus:
        return FutureStatus(
            self.state, self.kind, self.seq_id, self.request_id, now - self.created_at, self.polls, self.attempts,
            self.queue_state, self.queue_reason, self.last_error, self.note,
        )  # fmt: skip

    def waiting_line(self, now: float) -> str:
        """`waiting 95 s for forward_backward seq 12: queue paused_capacity ("…"), 3 polls, session alive`"""
        if self.put_off_reason:
            why = f'not accepted yet, attempt {self.attempts}, the service says "{self.put_off_reason}"'
        elif self.queue_state:
            why = f"queue {self.queue_state}" + (f' ("{self.queue_reason}")' if self.queue_reason else "")
        elif self.state == "accepted":
            why = "accepted by the service"
        elif self.state == "submitting":
            why = f"being submitted, attempt {self.attempts}"
        else:
            why = "not sent yet, waiting its turn"
        has_error = self.last_error and not self.put_off_reason
        error = f", last error: {self.last_error}" if has_error else ""
        session = self.session.state() if self.session else "no session"
        return f"waiting {now - self.waiting_since:.0f} s for {self.name}: {why}, {self.polls} polls, {session}{error}"
