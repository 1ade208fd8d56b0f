"""What Prometheus reads at /metrics. Counters grow as things happen; gauges are read from the service when asked.

Label values come from small fixed sets: the names of endpoints (never the path that was asked for), kinds, outcomes,
models that are served. No key is ever one, and tenants only as long as they are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.http.requests import service_of

if TYPE_CHECKING:
    from tinkex.server.service import Service

MOST_TENANTS: Final = 50
OTHER: Final = "other"

# From a cached answer to a sample that takes minutes.
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One registry per service, so that two in one process do not count for each other."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._requests = Counter("tinkex_requests", "HTTP requests.", ["endpoint", "status"], registry=registry)
        self._request_s = Histogram(
            "tinkex_request_seconds", "Time to answer a request.", ["endpoint"], buckets=_SECONDS, registry=registry
        )
        self._tenant_requests = Counter(
            "tinkex_tenant_requests", "HTTP requests by tenant.", ["tenant"], registry=registry
        )
        self._operations = Counter(
            "tinkex_operations", "Training operations that ended.", ["kind", "outcome"], registry=registry
        )
        self._queue_s = Histogram(
            "tinkex_operation_queue_seconds",
            "Time between acceptance and start of an operation.",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._engine_s = Histogram(
            "tinkex_operation_engine_seconds",
            "Time an operation took once started.",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._trained = Counter(
            "tinkex_trained_tokens", "Input tokens of passes that succeeded.", ["base_model", "kind"], registry=registry
        )
        self._samples = Counter("tinkex_samples", "Sampling requests that ended.", ["outcome"], registry=registry)
        self._sampled = Counter("tinkex_sampled_tokens", "Tokens drawn.", ["base_model"], registry=registry)
        self._prompted = Counter(
            "tinkex_prompt_tokens",
            "Tokens in the prompts of samples that succeeded.",
            ["base_model"],
            registry=registry,
        )
        self._checkpoints = Gauge("tinkex_checkpoints", "Checkpoints that are kept.", registry=registry)
        self._checkpoint_bytes = Gauge("tinkex_checkpoint_bytes", "Bytes of those checkpoints.", registry=registry)
        ProcessCollector(namespace="tinkex_server", registry=registry)

    # ── What happened

    def request(self, endpoint: str, status: int, seconds: float, tenant: str | None = None) -> None:
        """An HTTP request was answered. `endpoint` is a name from the table of routes, never a request's path."""
        self._requests.labels(endpoint, str(status)).inc()
        self._request_s.labels(endpoint).observe(seconds)
        if tenant is not None:
            self._tenant_requests.labels(self._tenant(tenant)).inc()

    def operation(self, kind: str, outcome: str, queue_s: float, engine_s: float, tokens: int, base_model: str) -> None:
        """A training operation ended."""
        self._operations.labels(kind, outcome).inc()
        self._queue_s.labels(kind).observe(max(queue_s, 0.0))
        self._engine_s.labels(kind).observe(engine_s)
        if outcome == "done" and tokens:
            self._trained.labels(base_model, kind).inc(tokens)

    def sample(self, outcome: str, prompt_tokens: int, sampled_tokens: int, base_model: str) -> None:
        """A sampling request ended."""
        self._samples.labels(outcome).inc()
        if outcome == "done":
            self._prompted.labels(base_model).inc(prompt_tokens)
        self._sampled.labels(base_model).inc(sampled_tokens)

    def _tenant(self, name: str) -> str:
        """Every tenant is a time series for as long as the server lives: the first ones by name, the rest together."""
        if name not in self._tenants and len(self._tenants) < MOST_TENANTS:
            self._tenants.add(name)
        return name if name in self._tenants else OTHER

    # ── What is the case

    def watch(self, service: Service) -> None:
        """Read this service's gauges at every scrape."""
        self.registry.register(_Gauges(lambda: self._readings(service)))

    def _readings(self, service: Service) -> Iterator[Metric]:
        state, worker, sampling = service.engine.state, service.worker, service.sampling
        yield GaugeMetricFamily("tinkex_engine_ready", "1 if the engine takes commands.", float(state.is_ready))
        restarts = max(state.generation - 1, 0)
        yield CounterMetricFamily("tinkex_engine_restarts", "How often the engine had to be started again.", restarts)
        yield GaugeMetricFamily("tinkex_engine_rss_bytes", "Memory of the engine's process.", float(state.rss_bytes))
        yield GaugeMetricFamily("tinkex_engine_adapters", "Adapters in the engine's memory.", len(worker.resident()))
        yield GaugeMetricFamily("tinkex_operations_queued", "Operations not finished.", float(worker.queued))
        yield GaugeMetricFamily("tinkex_samples_queued", "Sequences waiting to be sampled.", float(sampling.queued))
        yield GaugeMetricFamily("tinkex_samples_running", "Sequences being sampled.", float(sampling.running))
        by_tenant = GaugeMetricFamily(
            "tinkex_tenant_operations_queued", "Operations not finished, by tenant.", labels=["tenant"]
        )
        others = worker.queued
        for tenant in sorted(self._tenants):
            waiting = worker.waiting_of(tenant)
            others -= waiting
            by_tenant.add_metric([tenant], waiting)
        by_tenant.add_metric([OTHER], max(others, 0))
        yield by_tenant

    async def page(self, service: Service, accept: str, tenant: str) -> Response:
        """For one tenant: what others do is told in sums only."""
        count, size_bytes = await service.db(service.store.usage)
        self._checkpoints.set(count)
        self._checkpoint_bytes.set(size_bytes)
        encode, content_type = choose_encoder(accept)
        return Response(encode(_Seen(self.registry, tenant)), headers={"content-type": content_type})


class _Seen(CollectorRegistry):
    """A registry as one tenant may see it: series that name another tenant are left out."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        super().__init__()
        self._all, self._tenant = registry, tenant

    def collect(self) -> Iterator[Metric]:
        for metric in self._all.collect():
            own = [row for row in metric.samples if row.labels.get("tenant", self._tenant) in (self._tenant, OTHER)]
            if len(own) < len(metric.samples):
                metric.samples = own
            yield metric


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        # Names are checked against this when registering; the values need a service that runs.
        return []

    def collect(self) -> Iterator[Metric]:
        return self._read()


async def metrics_page(request: Request) -> Response:
    """`GET /metrics`: open where no keys are in use, for any valid key otherwise."""
    service = service_of(request)
    tenant = await service.access.admit(request.scope["headers"])
    return await service.metrics.page(service, request.headers.get("accept", ""), tenant)
