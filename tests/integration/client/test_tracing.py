"""OpenTelemetry and log context: the caller's context travels with its operations, and nothing else does."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode, Tracer

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tinkex.client._runtime import session
from tinkex.testing import Delay, Pending, Request, ScriptedService, Status

Connect = Callable[..., tinkex.ServiceClient]
PARAMS = tinkex.SamplingParams(max_tokens=3, seed=1)
who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


class Spans(InMemorySpanExporter):
    """What ended, and a way to wait for it: a future is done a moment before its span is."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def export(self, spans: Any) -> Any:
        with self._changed:
            outcome = super().export(spans)
            self._changed.notify_all()
        return outcome

    def of(self, name: str, count: int = 1) -> list[ReadableSpan]:
        def found() -> list[ReadableSpan]:
            return [span for span in self.get_finished_spans() if span.name == name]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, 10), [
                s.name for s in self.get_finished_spans()
            ]
        return found()


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def tracer(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> Tracer:
    """A program that has set OpenTelemetry up. Set back afterwards, which the real `set_tracer_provider` cannot."""
    return _set_up(spans, monkeypatch).get_tracer("the program")


def _set_up(spans: Spans, monkeypatch: pytest.MonkeyPatch, **options: Any) -> TracerProvider:
    provider = TracerProvider(**options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return provider


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def traceparent(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def test_every_operation_is_a_span_below_the_callers(
    service: ScriptedService, connect: Connect, tracer: Tracer, spans: Spans
) -> None:
    with tracer.start_as_current_span("training loop") as loop:
        client = connect(service)
        training = client.create_lora_training_client(MODEL)
        passed, stepped = training.forward_backward([datum()], "cross_entropy"), training.optim_step(step())
        passed.result(20), stepped.result(20)
        sampler = client.create_sampling_client(base_model=MODEL)
        sampler.sample(prompt(), 1, PARAMS).result(20)
    for name in ("create_model", "forward_backward", "optim_step", "sample"):
        (span,) = spans.of(name)
        assert parent_of(span) == loop.get_span_context().span_id
        assert span.kind is SpanKind.CLIENT
        assert attributes(span)["server.address"] == "127.0.0.1"
        assert attributes(span)["tinkex.state"] == "done"
    known = attributes(spans.of("optim_step")[0])
    assert known["tinkex.model_id"] == training.model_id
    assert known["tinkex.seq_id"] == 2
    assert known["tinkex.request_id"] == stepped.status().request_id
    assert known["tinkex.attempts"] == 1 and known["tinkex.polls"] >= 1
    assert {"tinkex.submit_s", "tinkex.queue_s", "tinkex.compute_s", "tinkex.fetch_s"} <= known.keys()


def test_requests_carry_the_traceparent_of_their_operation(
    service: ScriptedService, connect: Connect, tracer: Tracer, spans: Spans
) -> None:
    training = connect(service).create_lora_training_client(MODEL)
    service.script.on("optim_step", nth=1, do=Status(503, headers={"retry-after-ms": "5"}))
    before = len(service.requests)
    with tracer.start_as_current_span("loop"):
        training.optim_step(step()).result(20)
    (span,) = spans.of("optim_step")
    sent = [request for request in service.requests[before:] if request.endpoint != "session_heartbeat"]
    assert [request.endpoint for request in sent][:2] == ["optim_step", "optim_step"]
    assert {request.headers["traceparent"] for request in sent} == {traceparent(span)}
    assert attributes(span)["tinkex.attempts"] == 2


def test_operations_that_queue_behind_each_other_keep_their_own_parents(
    proto_service: ScriptedService, connect: Connect, tracer: Tracer, spans: Spans
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", nth=1, do=Delay(0.2))
    parents, futures = [], []
    for number in range(3):
        with tracer.start_as_current_span(f"step {number}") as parent:
            parents.append(parent.get_span_context().span_id)
            futures.append(training.optim_step(step()))
    assert all(future.result(20) for future in futures)
    found = sorted(spans.of("optim_step", 3), key=lambda span: attributes(span)["tinkex.seq_id"])
    assert [parent_of(span) for span in found] == parents
    sent = proto_service.requests_to("optim_step")
    assert [request.headers["traceparent"] for request in sent] == [traceparent(span) for span in found]


def test_a_failed_operation_is_a_failed_span_that_holds_no_secret(
    proto_service: ScriptedService, connect: Connect, tracer: Tracer, spans: Spans
) -> None:
    client = connect(proto_service)
    training = client.create_lora_training_client(MODEL)
    key = client._session.config.api_key
    proto_service.script.on("optim_step", do=Status(403, f"the key {key} may not train"))
    with pytest.raises(tinkex.PermissionDeniedError):
        training.optim_step(step()).result(20)
    (span,) = spans.of("optim_step")
    assert span.status.status_code is StatusCode.ERROR
    assert "may not train" in (span.status.description or "")
    assert attributes(span)["error.type"] == "PermissionDeniedError"
    assert attributes(span)["tinkex.state"] == "failed"
    assert key not in span.to_json()


def test_a_cancelled_operation_is_no_failure(
    proto_service: ScriptedService, connect: Connect, tracer: Tracer, spans: Spans
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=Pending("paused_capacity", "all busy", times=1000))
    future = training.optim_step(step())
    proto_service.wait_for_requests("retrieve_future", 3)
    assert future.cancel()
    (span,) = spans.of("optim_step")
    assert span.status.status_code is StatusCode.UNSET
    known = attributes(span)
    assert known["tinkex.state"] == "cancelled"
    assert (known["tinkex.queue_state"], known["tinkex.queue_reason"]) == ("paused_capacity", "all busy")


def test_what_serves_everybody_belongs_to_nobodys_trace(
    service: ScriptedService, connect: Connect, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.02)
    seen: list[str] = []
    stop = tinkex.on("request", lambda event: seen.append(who.get()) if event.endpoint == "session_heartbeat" else None)
    token = who.set("the first caller")
    try:
        with tracer.start_as_current_span("loop"):
            training = connect(service, telemetry=True).create_lora_training_client(MODEL)
            training.optim_step(step()).result(20)
            service.wait_for_requests("session_heartbeat", 3)
    finally:
        who.reset(token)
        stop()
    assert "traceparent" in service.requests_to("optim_step")[0].headers
    shared = [*service.requests_to("session_heartbeat"), *service.requests_to("telemetry")]
    assert not any("traceparent" in request.headers for request in shared)
    assert set(seen) == {"nobody"}


def test_baggage_stays_here(proto_service: ScriptedService, connect: Connect, tracer: Tracer) -> None:
    client = connect(proto_service)
    token = context.attach(baggage.set_baggage("customer", "4711"))
    try:
        with tracer.start_as_current_span("loop"):
            client.get_server_capabilities()
    finally:
        context.detach(token)
    (request,) = proto_service.requests_to("get_server_capabilities")
    assert "traceparent" in request.headers
    assert "baggage" not in request.headers


def test_a_trace_that_is_not_recorded_still_tells_the_service_so(
    proto_service: ScriptedService, connect: Connect, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_up(spans, monkeypatch, sampler=ALWAYS_OFF)
    connect(proto_service).get_server_capabilities()
    (request,) = proto_service.requests_to("get_server_capabilities")
    flags = int(request.headers["traceparent"][-2:], 16)
    assert flags & 1 == 0
    assert spans.get_finished_spans() == ()


class Broken(Sampler):
    """A sampler with a bug."""

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        raise RuntimeError("a bug in the program's own sampler")

    def get_description(self) -> str:
        return "broken"


def test_a_fault_in_the_programs_tracing_fails_no_operation(
    proto_service: ScriptedService,
    connect: Connect,
    spans: Spans,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _set_up(spans, monkeypatch, sampler=Broken())
    training = connect(proto_service).create_lora_training_client(MODEL)
    assert training.optim_step(step()).result(20) is not None
    assert "No span could be opened for optim_step seq 1" in caplog.text


def test_a_stream_is_one_operation_however_many_chunks_it_has(
    proto_service: ScriptedService, connect: Connect, tracer: Tracer, spans: Spans
) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    steps: list[str] = []
    stop = tinkex.on("step", lambda event: steps.append(event.operation))
    try:
        with tracer.start_as_current_span("chat") as parent:
            chunks = list(sampler.stream(prompt(), tinkex.SamplingParams(max_tokens=5, seed=1)))
        assert len(chunks) > 2
        (span,) = spans.of("stream")
    finally:
        stop()
    assert parent_of(span) == parent.get_span_context().span_id
    (request,) = proto_service.requests_to("sample_stream")
    assert request.headers["traceparent"] == traceparent(span)
    assert steps.count("stream") == 1


@pytest.fixture
def heard() -> Iterator[list[tuple[str, str]]]:
    """(event, the caller as its listener sees it)."""
    found: list[tuple[str, str]] = []

    def note(name: str) -> Callable[[Any], object]:
        return lambda event: found.append((name, who.get()))

    stops = [tinkex.on(name, note(name)) for name in ("request", "retry", "poll", "queue", "step")]
    yield found
    for stop in stops:
        stop()


def test_listeners_see_the_context_of_the_caller(
    service: ScriptedService, connect: Connect, heard: list[tuple[str, str]]
) -> None:
    client = connect(service)
    training = client.create_lora_training_client(MODEL)
    sampler = client.create_sampling_client(base_model=MODEL)
    again = {"retry-after-ms": "5"}

    def is_first(request: Request) -> bool:
        return bool(request.json.get("seq_id") == 1)

    service.script.on("optim_step", nth=1, do=Status(503, headers=again))
    service.script.on("optim_step", where=is_first, do=Pending("paused_capacity", "busy"))
    service.script.on("asample", nth=1, do=Status(503, headers=again))
    heard.clear()
    ended = threading.Semaphore(0)
    stop = tinkex.on("step", lambda event: ended.release())
    calls: dict[str, Callable[[], tinkex.APIFuture[Any]]] = {
        "alice": lambda: training.optim_step(step()),
        "bob": lambda: training.optim_step(step()),  # queued behind alice's, and none of her business
        "carol": lambda: sampler.sample(prompt(), 1, PARAMS),
    }
    futures = []
    for name, call in calls.items():
        copy = contextvars.copy_context()
        copy.run(who.set, name)
        futures.append(copy.run(call))
    try:
        assert all(future.result(20) for future in futures)
        assert all(ended.acquire(timeout=10) for _ in futures)
    finally:
        stop()
    # Heartbeats and what the session does for itself belong to nobody.
    per_caller = {name: {event for event, by in heard if by == name} for name in calls}
    assert per_caller["alice"] == {"request", "retry", "poll", "queue", "step"}
    assert per_caller["bob"] == {"request", "poll", "step"}
    assert per_caller["carol"] >= {"request", "retry", "poll", "step"}
    assert sorted(by for event, by in heard if event == "step") == ["alice", "bob", "carol"]


def test_queue_observers_and_custom_losses_run_in_the_context_of_the_caller(
    proto_service: ScriptedService, connect: Connect
) -> None:
    training = connect(proto_service).create_lora_training_client(MODEL)
    seen: list[str] = []

    def loss(data: list[tinkex.Datum], logprobs: list[Any]) -> Any:
        seen.append(who.get())
        return -logprobs[0].sum(), {}

    proto_service.script.on("forward_backward", nth=1, do=Pending("paused_capacity", "busy"))
    training.on_queue_state(lambda state, reason: seen.append(who.get()))
    copy = contextvars.copy_context()
    copy.run(who.set, "dave")
    copy.run(training.forward_backward_custom, [datum()], loss).result(30)
    assert len(seen) >= 2
    assert set(seen) == {"dave"}


SCRIPT = """
import sys
{setup}
import tinkex
client = tinkex.ServiceClient(base_url={url!r}, api_key="tml-x", telemetry=False)
training = client.create_lora_training_client({model!r})
training.optim_step(tinkex.AdamParams()).result(20)
client.close().result(10)
print(sorted(name for name in sys.modules if name.partition(".")[0] == "opentelemetry"))
"""
REAL_SETUP = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
"""


@pytest.mark.parametrize(
    ("setup", "is_traced"),
    [("", False), ("import opentelemetry.trace", False), (REAL_SETUP, True)],
    ids=["not imported", "imported but not set up", "set up"],
)
def test_only_a_program_that_set_it_up_is_traced(proto_service: ScriptedService, setup: str, is_traced: bool) -> None:
    code = SCRIPT.format(setup=setup, url=proto_service.url, model=MODEL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    if not setup:
        assert done.stdout.strip() == "[]"  # a light client loads nothing that nobody asked for
    (request,) = proto_service.requests_to("optim_step")
    assert ("traceparent" in request.headers) is is_traced
