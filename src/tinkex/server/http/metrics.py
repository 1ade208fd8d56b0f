"""Counts what the service does, for Prometheus. The page itself, with gauges of the present state, is `routes.metrics`.

Label values come from small fixed sets: the names of endpoints (never the path of a request), kinds, outcomes, models
that are served. An API key is never one, and only the first tenants are named.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from tinkex.settings import LIMITS

MAX_NAMED_TENANTS: Final = 50
OTHER_TENANTS: Final = "other"

# From a cached response to a sample that takes minutes.
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The counters of one service. Each service has its own registry, so that two in one process do not mix."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._tenants: set[str] = set()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._requests = counter("tinkex_requests", "HTTP requests.", ["endpoint", "status"])
        self._request_s = histogram("tinkex_request_seconds", "Time to answer a request.", ["endpoint"])
        self._tenant_requests = counter("tinkex_tenant_requests", "HTTP requests by tenant.", ["tenant"])
        self._operations = counter("tinkex_operations", "Training operations that ended.", ["kind", "outcome"])
        self._queue_s = histogram(
            "tinkex_operation_queue_seconds", "Time between acceptance and start of an operation.", ["kind"]
        )
        self._engine_s = histogram("tinkex_operation_engine_seconds", "Time an operation took once started.", ["kind"])
        self._trained = counter(
            "tinkex_trained_tokens", "Input tokens of passes that succeeded.", ["base_model", "kind"]
        )
        self._samples = counter("tinkex_samples", "Sampling requests that ended.", ["outcome"])
        self._sampled = counter("tinkex_sampled_tokens", "Tokens drawn.", ["base_model"])
        self._prompted = counter(
            "tinkex_prompt_tokens", "Tokens in the prompts of samples that succeeded.", ["base_model"]
        )
        self._checkpoints = gauge("tinkex_checkpoints", "Checkpoints that are stored.")
        self._checkpoint_bytes = gauge("tinkex_checkpoint_bytes", "Bytes of those checkpoints.")
        self._stalls = counter(
            "tinkex_loop_stalls",
            "Times that the event loop was blocked for 50 ms or more: by code, or waiting for a core, a lock, a disk.",
            ["cause"],
        )
        self._longest_stall = gauge("tinkex_loop_longest_stall_seconds", "The longest of those times.", ["cause"])
        self._longest_s: dict[str, float] = {}
        self._limits = counter("tinkex_limit_rejections", "Requests that a limit rejected.", ["limit"])
        for cause in ("code", "waiting"):
            self._stalls.labels(cause)
            self._longest_stall.labels(cause).set(self._longest_s.setdefault(cause, 0.0))
        for limit in LIMITS:  # a series from the start: a rate needs the zero before the first rejection
            self._limits.labels(limit.setting.name)
        ProcessCollector(namespace="tinkex_server", registry=registry)

    def stall(self, cause: str, seconds: float) -> None:
        """Count that the event loop was blocked for so long."""
        self._stalls.labels(cause).inc()
        self._longest_s[cause] = max(self._longest_s[cause], seconds)
        self._longest_stall.labels(cause).set(self._longest_s[cause])

    def limit_rejection(self, limit: str) -> None:
        """Count that a limit, named by its setting, rejected something."""
        self._limits.labels(limit).inc()

    def request(self, endpoint: str, status: int, seconds: float, tenant: str | None = None) -> None:
        """Count an HTTP request that got its response. `endpoint` is a name from the table of routes, never a path."""
        self._requests.labels(endpoint, str(status)).inc()
        self._request_s.labels(endpoint).observe(seconds)
        if tenant is not None:
            self._tenant_requests.labels(self._tenant(tenant)).inc()

    def operation(self, kind: str, outcome: str, queue_s: float, engine_s: float, tokens: int, base_model: str) -> None:
        self._operations.labels(kind, outcome).inc()
        self._queue_s.labels(kind).observe(max(queue_s, 0.0))
        self._engine_s.labels(kind).observe(engine_s)
        if outcome == "done" and tokens:
            self._trained.labels(base_model, kind).inc(tokens)

    def sample(self, outcome: str, prompt_tokens: int, sampled_tokens: int, base_model: str) -> None:
        self._samples.labels(outcome).inc()
        if outcome == "done":
            self._prompted.labels(base_model).inc(prompt_tokens)
        self._sampled.labels(base_model).inc(sampled_tokens)

    def _tenant(self, name: str) -> str:
        """Return the label for a tenant: its name for the first ones, one label for the rest.

        Each label is a time series for as long as the server runs.
        """
        if name not in self._tenants and len(self._tenants) < MAX_NAMED_TENANTS:
            self._tenants.add(name)
        return name if name in self._tenants else OTHER_TENANTS

    def checkpoints(self, count: int, size_bytes: int) -> None:
        self._checkpoints.set(count)
        self._checkpoint_bytes.set(size_bytes)

    @property
    def named_tenants(self) -> list[str]:
        return sorted(self._tenants)
