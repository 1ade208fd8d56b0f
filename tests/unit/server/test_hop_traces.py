"""A client's trace across the hop: which header counts, what log lines say, and where the spans hang."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from tinkex.server.cluster.hop import Headers
from tinkex.server.cluster.traces import TRACEPARENT, TraceFilter, handing_on, serving, trace_in

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01".encode()
PATH = "/api/v1/training_runs/some-run/steps"


def scope(parent: bytes = PARENT) -> dict[str, Any]:
    return {"type": "http", "method": "GET", "headers": [(b"host", b"front"), (TRACEPARENT, parent)]}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        PARENT.upper(),
        b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01",
        PARENT + b"x",
        PARENT.replace(b"-", b"_"),
    ],
)
def test_a_header_that_names_no_trace_is_ignored(value: bytes) -> None:
    assert trace_in([(TRACEPARENT, value)]) == trace_in([]) == ""
    assert trace_in([(b"x", b"y"), (TRACEPARENT, PARENT)]) == TRACE


def test_what_is_logged_about_a_request_has_its_trace_and_nothing_else_has(caplog: pytest.LogCaptureFixture) -> None:
    logger, traces = logging.getLogger("tinkex.server"), TraceFilter()
    logger.addFilter(traces)
    try:
        with caplog.at_level("DEBUG", "tinkex.server"):
            with serving(scope(), TRACE, PATH), handing_on([(TRACEPARENT, PARENT)], "http://n:1") as headers:
                logger.info("100 %% of %s", "it")
            logger.info("later")
    finally:
        logger.removeFilter(traces)
    assert [record.getMessage() for record in caplog.records] == [
        f"GET /api/v1/training_runs came in [trace {TRACE}]",
        f"handed to http://n:1 [trace {TRACE}]",
        f"100 % of it [trace {TRACE}]",
        "later",
    ]
    assert dict(headers)[TRACEPARENT].startswith(f"00-{TRACE}-".encode())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_the_spans_of_both_servers_hang_below_the_clients(spans: InMemorySpanExporter) -> None:
    with serving(scope(), TRACE, PATH), handing_on(scope()["headers"], "http://n:1") as headers:
        sent: Headers = headers
    [parent] = [value for name, value in sent if name == TRACEPARENT]
    with serving(scope(parent), TRACE, PATH):
        pass
    hop, front, home = spans.get_finished_spans()
    assert [span.name for span in (front, hop, home)] == [
        "GET /api/v1/training_runs",
        "hop",
        "GET /api/v1/training_runs",
    ]
    assert [span.kind for span in (front, hop, home)] == [SpanKind.SERVER, SpanKind.CLIENT, SpanKind.SERVER]
    assert {f"{span.context.trace_id:032x}" for span in (front, hop, home) if span.context} == {TRACE}
    assert front.parent is not None and f"{front.parent.span_id:016x}" == SPAN
    assert hop.parent == front.context and home.parent is not None and hop.context is not None
    assert home.parent.span_id == hop.context.span_id
    assert dict(sent)[b"host"] == b"front" and len(sent) == 2


def test_a_request_without_a_trace_gets_no_span_and_no_header(spans: InMemorySpanExporter) -> None:
    with handing_on([(b"host", b"front")], "http://n:1") as sent:
        pass
    assert sent == [(b"host", b"front")] and not spans.get_finished_spans()
