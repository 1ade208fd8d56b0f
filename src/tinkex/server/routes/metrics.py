"""`GET /metrics`: the counters of the service and gauges of its present state, in the format of Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response

from tinkex.engine.contract import EngineState
from tinkex.server.http.metrics import OTHER_TENANTS
from tinkex.server.http.requests import ApiRequest
from tinkex.server.service import Service


async def metrics(request: ApiRequest) -> Response:
    """Return the page: without a key where no keys are in use, for any valid key otherwise."""
    service = request.service
    tenant = await service.access.admit(request.scope)
    service.ledger.spend_request(tenant)
    service.metrics.checkpoints(*await service.db(service.store.usage))
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    page = encode(_TenantView(service.metrics.registry, tenant))
    return Response(page, headers={"content-type": content_type})


class _TenantView(CollectorRegistry):
    """The metrics that one tenant may see: series that name another tenant are left out."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        super().__init__()
        self._registry, self._visible = registry, (tenant, OTHER_TENANTS)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            visible = [row for row in metric.samples if row.labels.get("tenant", OTHER_TENANTS) in self._visible]
            if len(visible) < len(metric.samples):
                metric.samples = visible
            yield metric


class ServiceGauges(Collector):
    """Gauges that are read from the service at every scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        # The registry checks names against this when it registers a collector; the values need a running service.
        return []

    def collect(self) -> Iterator[Metric]:
        service = self._service
        state, worker, sampling = service.engine.state, service.worker, service.sampling
        yield GaugeMetricFamily("tinkex_engine_ready", "1 if the engine takes commands.", float(state.is_ready))
        restarts = max(state.generation - 1, 0)
        yield CounterMetricFamily("tinkex_engine_restarts", "How often the engine had to be started again.", restarts)
        yield GaugeMetricFamily("tinkex_engine_rss_bytes", "Memory of the engine's process.", float(state.rss_bytes))
        yield GaugeMetricFamily("tinkex_engine_adapters", "Adapters in the engine's memory.", len(worker.resident()))
        yield GaugeMetricFamily("tinkex_adapter_bytes", "Memory of these adapters.", float(worker.memory.used_bytes))
        yield from model_metrics(service)
        yield GaugeMetricFamily("tinkex_operations_queued", "Operations not finished.", float(worker.queued))
        yield GaugeMetricFamily("tinkex_samples_queued", "Sequences waiting to be sampled.", float(sampling.queued))
        yield GaugeMetricFamily("tinkex_samples_running", "Sequences being sampled.", float(sampling.running))
        if samplers := state.extras.get("samplers"):
            yield from sampler_metrics(samplers)
        rejected = CounterMetricFamily(
            "tinkex_unauthorised_requests", "Requests that were rejected for their API key.", labels=["reason"]
        )
        rejected.add_metric(["wrong_key"], service.access.rejected_keys.wrong)
        rejected.add_metric(["no_key"], service.access.rejected_keys.missing)
        yield rejected
        by_tenant = GaugeMetricFamily(
            "tinkex_tenant_operations_queued", "Operations not finished, by tenant.", labels=["tenant"]
        )
        others = worker.queued
        for tenant in service.metrics.named_tenants:
            waiting = worker.queued_work.waiting_of(tenant)
            others -= waiting
            by_tenant.add_metric([tenant], waiting)
        by_tenant.add_metric([OTHER_TENANTS], max(others, 0))
        yield by_tenant


def model_metrics(service: Service) -> Iterator[Metric]:
    """Yield which of the offered base models are loaded, and what they take."""
    loaded = GaugeMetricFamily(
        "tinkex_base_model_loaded", "1 if the base model is in the engine's memory.", labels=["base_model"]
    )
    size = GaugeMetricFamily(
        "tinkex_base_model_bytes", "Memory of the base model while it is loaded.", labels=["base_model"]
    )
    loads = CounterMetricFamily(
        "tinkex_base_model_loads", "How often the base model was loaded after the start.", labels=["base_model"]
    )
    for model in service.catalog.models:
        status = service.worker.models.status(model)
        loaded.add_metric([model.name], float(status["is_loaded"]))
        size.add_metric([model.name], status["size_bytes"] if status["is_loaded"] else 0)
        loads.add_metric([model.name], status["loads"])
    yield from (loaded, size, loads)


def sampler_metrics(samplers: Mapping[str, EngineState]) -> Iterator[Metric]:
    """Yield what is known of engines that only sample, by their base model."""
    ready = GaugeMetricFamily("tinkex_sampler_ready", "1 if the sampler takes requests.", labels=["base_model"])
    restarts = CounterMetricFamily(
        "tinkex_sampler_restarts", "How often the sampler had to be started again.", labels=["base_model"]
    )
    adapters = GaugeMetricFamily("tinkex_sampler_adapters", "Adapters that it has loaded.", labels=["base_model"])
    proofs = CounterMetricFamily(
        "tinkex_sampler_proofs",
        "Adapters that showed the log-probabilities of the trainer, and that did not, since its start.",
        labels=["base_model", "outcome"],
    )
    differences = GaugeMetricFamily(
        "tinkex_sampler_logprob_difference",
        "The largest difference of a log-probability to the trainer, in the last proof and since its start.",
        labels=["base_model", "of"],
    )
    for name, state in samplers.items():
        stats = state.extras
        ready.add_metric([name], float(state.is_ready))
        restarts.add_metric([name], max(state.generation - 1, 0))
        adapters.add_metric([name], stats.get("adapters", 0))
        for outcome in ("passed", "failed"):
            proofs.add_metric([name, outcome], stats.get(f"proofs_{outcome}", 0))
        for of, key in (("last", "logprob_difference"), ("largest", "largest_logprob_difference")):
            value = stats.get(key, 0.0)
            differences.add_metric([name, of], math.inf if value is None else value)  # JSON has no infinity
    yield from (ready, restarts, adapters, proofs, differences)
