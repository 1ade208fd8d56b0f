"""A local event bus: `tinkex.on("retry", print)`. Nothing here leaves the process.

Events are frozen records with ids, counts and timings; they never hold a body, a header or a key. Listeners run on
the SDK's loop thread ("start": on the caller's): they must be quick and must not call the SDK and wait. A listener that
raises is logged and kept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tinkex.errors import ValidationError

log = logging.getLogger("tinkex.events")


class Usage(NamedTuple):
    """Tokens of an operation, by the kinds that services price. Zeros if no listener was registered when it began."""

    train_tokens: int = 0
    """Of forward_backward, and of the second pass of a custom loss."""
    prefill_tokens: int = 0
    """Of forward, of the first pass of a custom loss, and of the prompts of samples (once, however many samples)."""
    sampled_tokens: int = 0
    """Known when the sample has ended."""
    base_model: str = ""
    """Empty where the client does not know it, as for a sampler made from a path."""


class StartEvent(NamedTuple):
    """A method of a training or sampling client was called; nothing has been sent yet."""

    operation: str
    model_id: str
    number: int
    """The operation's: its `StepEvent` has the same. Counts up in this process."""
    usage: Usage = Usage()
    session_id: str = ""


class RequestEvent(NamedTuple):
    """One HTTP exchange ended (also a failed one: `status` is 0 without a response)."""

    endpoint: str
    status: int
    attempt: int
    seconds: float
    sent_bytes: int
    received_bytes: int
    error: str = ""


class RetryEvent(NamedTuple):
    """A request will be sent again after `delay_s`."""

    endpoint: str
    attempt: int
    delay_s: float
    reason: str


class PollEvent(NamedTuple):
    """A poll was answered. `outcome`: pending, metadata, failed, done, error."""

    operation: str
    request_id: str
    polls: int
    outcome: str


class QueueEvent(NamedTuple):
    """The service reported why an operation waits."""

    operation: str
    request_id: str
    state: str
    reason: str | None
    model_id: str = ""
    session_id: str = ""
    number: int = 0


class StepEvent(NamedTuple):
    """An operation ended. `seconds` = submit + queue + compute + fetch."""

    operation: str
    model_id: str
    seq_id: int
    request_id: str
    ok: bool
    seconds: float
    submit_s: float
    queue_s: float
    compute_s: float
    fetch_s: float
    error: str = ""
    number: int = 0
    usage: Usage = Usage()
    metrics: Mapping[str, float] = MappingProxyType({})
    """Those of the response; of an optim_step also `learning_rate`, as it was given."""
    session_id: str = ""
    reason: str = ""
    """Why it failed, in words. Empty if it succeeded or was cancelled."""


Event = StartEvent | RequestEvent | RetryEvent | PollEvent | QueueEvent | StepEvent
NAMES = ("start", "request", "retry", "poll", "queue", "step")
_listeners: dict[str, tuple[Callable[[Any], object], ...]] = dict.fromkeys(NAMES, ())
_changing = threading.Lock()


def on(event: str, listener: Callable[[Any], object]) -> Callable[[], None]:
    """Call `listener` with every event of that name; returns a function that ends it.

    >>> import tinkex
    >>> stop = tinkex.on("step", lambda step: print(step.operation, step.seconds))
    >>> stop()
    """
    if event not in _listeners:
        raise ValidationError(f"There is no event {event!r}. Events: {', '.join(NAMES)}.")
    with _changing:
        _listeners[event] = (*_listeners[event], listener)

    def stop() -> None:
        with _changing:
            _listeners[event] = tuple(entry for entry in _listeners[event] if entry is not listener)

    return stop


def wanted(event: str) -> bool:
    """Whether anyone listens: hot paths ask before they build a record."""
    return bool(_listeners[event])


def counts_usage() -> bool:
    """Whether anyone listens to events that tell tokens."""
    return bool(_listeners["start"] or _listeners["step"])


def emit(event: str, record: Event) -> None:
    for listener in _listeners[event]:
        try:
            listener(record)
        except (Exception, SystemExit):  # an edge: a listener's fault must not fail the operation it watches
            log.exception("A listener of %r events raised", event)
