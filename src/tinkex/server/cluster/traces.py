"""Carries a client's trace across the hop: W3C `traceparent`, in log lines and, where the process has them, in spans.

The header itself goes from server to server with all others. Without the header nothing is done; without OpenTelemetry
only log lines have the trace: the package is not imported unless whoever started the server has set it up
(`opentelemetry-instrument tinkex serve`).
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from starlette.types import Scope

from tinkex._version import __version__
from tinkex.server.cluster.hop import Headers

TRACEPARENT = b"traceparent"
_VALID = re.compile(rb"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_NAMED_PARTS = 4
"""Parts of a path that name a span: `/api/v1/training_runs`, and not the run."""
_current: ContextVar[str] = ContextVar("tinkex_trace", default="")
"""The trace of the request that is served here. Its operation runs in a copy of its context."""
logger = logging.getLogger("tinkex.server")


class TraceFilter(logging.Filter):
    """Adds the trace to what is logged about a request that has one."""

    def filter(self, record: logging.LogRecord) -> bool:
        if trace := _current.get():
            record.msg, record.args = f"{record.getMessage()} [trace {trace}]", ()
        return True


def trace_in(headers: Headers) -> str:
    """Return the id of a request's trace, or ""."""
    value = next((value for name, value in headers if name == TRACEPARENT), b"")
    found = _VALID.fullmatch(value)
    return found[1].decode() if found else ""


@contextmanager
def serving(scope: Scope, trace: str, path: str) -> Iterator[None]:
    """Note the trace of a request while it is served, here or by the node it is handed to."""
    token, name = _current.set(trace), f"{scope['method']} {'/'.join(path.split('/')[:_NAMED_PARTS])}"
    logger.debug("%s came in", name)
    try:
        with _span(name, "SERVER", scope["headers"]):
            yield
    finally:
        _current.reset(token)


@contextmanager
def handing_on(headers: Headers, url: str) -> Iterator[Headers]:
    """Yield the headers for the other node: with a span of the hop as their parent, if there is one."""
    if not _current.get():
        yield headers
        return
    logger.debug("handed to %s", url)
    with _span("hop", "CLIENT", headers, {"server.address": url}) as span:
        yield headers if span is None else _with_parent(headers, span)


@contextmanager
def _span(name: str, kind: str, headers: Headers, attributes: dict[str, str] | None = None) -> Iterator[Any]:
    """Open a span below the current one, or below the one in the headers; None without OpenTelemetry."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        yield None
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = context.get_current()
    if not api.get_current_span().get_span_context().is_valid:
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        parent = TraceContextTextMapPropagator().extract(carrier, parent)
    tracer = api.get_tracer_provider().get_tracer("tinkex", __version__)
    kinds = {"SERVER": api.SpanKind.SERVER, "CLIENT": api.SpanKind.CLIENT}
    with tracer.start_as_current_span(name, context=parent, kind=kinds[kind], attributes=attributes) as span:
        yield span


def _with_parent(headers: Headers, span: Any) -> Headers:
    """Return the headers with this span as the parent, if it is one that counts."""
    known = span.get_span_context()
    if not known.is_valid:
        return headers
    parent = f"00-{known.trace_id:032x}-{known.span_id:016x}-{int(known.trace_flags):02x}"
    return [*((name, value) for name, value in headers if name != TRACEPARENT), (TRACEPARENT, parent.encode())]
