"""OpenTelemetry: opens a span for each operation and adds `traceparent` to its requests, where the program has set
that up.

Nothing is imported that the program has not imported itself. Without a tracer provider of the program's own, each
function here costs less than a microsecond. Only `traceparent` and `tracestate` are sent: baggage is the program's
business, not the service's.
"""

from __future__ import annotations

import contextvars
import logging
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tinkex._version import __version__
from tinkex.redact import redact

if TYPE_CHECKING:
    from tinkex.client._runtime.operation import Operation
    from tinkex.events import StepEvent

log = logging.getLogger("tinkex.tracing")
_current: contextvars.ContextVar[Any] = contextvars.ContextVar("tinkex_span", default=None)
"""The span of the operation that runs here."""
_latest: tuple[Any, Any] = (None, None)
"""The provider seen last, and our tracer from it."""


def begin(operation: Operation, base_url: str) -> None:
    """Open the operation's span, a child of the caller's, and make it the current one.

    To be called in the context that the operation's tasks run in, a copy of the caller's: it is never set back.
    """
    tracer = _tracer()
    if tracer is None:
        return
    from opentelemetry import context, trace

    try:
        host = urlsplit(base_url).hostname
        known = {"server.address": host, "tinkex.model_id": operation.model_id, "tinkex.seq_id": operation.seq_id}
        span = tracer.start_span(operation.kind, kind=trace.SpanKind.CLIENT, attributes=_without_blanks(known))
        context.attach(trace.set_span_in_context(span))
        _current.set(span)
        operation.span = span
    except Exception:  # an edge: the program's samplers and processors must not fail the operation they watch
        log.exception("No span could be opened for %s", operation.name)


def end(operation: Operation, step: StepEvent) -> None:
    """Close the span with what is known now. The names are those of `StepEvent` and `future.status()`."""
    span, operation.span = operation.span, None
    if span is None:
        return
    from opentelemetry.trace import Status, StatusCode

    known = {
        "seq_id": operation.seq_id, "request_id": operation.request_id, "state": operation.state,
        "attempts": operation.attempts, "polls": operation.polls, "queue_state": operation.queue_state,
        "queue_reason": operation.queue_reason, "submit_s": step.submit_s, "queue_s": step.queue_s,
        "compute_s": step.compute_s, "fetch_s": step.fetch_s,
    }  # fmt: skip
    try:
        span.set_attributes(_without_blanks({f"tinkex.{name}": value for name, value in known.items()}))
        if operation.state == "failed":
            span.set_attribute("error.type", step.error)
            span.set_status(Status(StatusCode.ERROR, redact(operation.last_error or "")))
        span.end()
    except Exception:  # an edge, as above
        log.exception("The span of %s could not be closed", operation.name)


def inject(headers: dict[str, str]) -> None:
    """Add the `traceparent` of the operation that runs here; nothing where there is none."""
    span = _current.get()
    if span is None:
        return
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))


def _tracer() -> Any:
    """Return our tracer, or None where the program has no provider. Looked up each time: it may change."""
    global _latest
    # Libraries import the bare API for their own purposes; that alone means nothing.
    find = getattr(sys.modules.get("opentelemetry.trace"), "get_tracer_provider", None)
    if find is None:
        return None
    provider = find()
    if provider is not _latest[0]:
        from opentelemetry.trace import NoOpTracerProvider, ProxyTracerProvider

        is_real = not isinstance(provider, (NoOpTracerProvider, ProxyTracerProvider))
        _latest = provider, provider.get_tracer("tinkex", __version__) if is_real else None
    return _latest[1]


def _without_blanks(known: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in known.items() if value is not None and value != ""}
