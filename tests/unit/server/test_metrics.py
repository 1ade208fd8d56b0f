"""The metrics for Prometheus, read with its own parser, over HTTP, from a service with a scripted engine."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.live import Loop, checkpoint
from tinkex.engine.contract import ModelInfo
from tinkex.server.app import make_app
from tinkex.server.http.metrics import MAX_NAMED_TENANTS, Metrics
from tinkex.server.main import build
from tinkex.server.service import Service
from tinkex.settings import ServeConfig
from tinkex.store.store import Store

KEY = "tml-metrics-0123456789"


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_an_operation_is_counted_with_its_times_and_tokens() -> None:
    metrics = Metrics()
    metrics.operation("forward_backward", "done", 0.02, 1.5, 300, "m")
    metrics.operation("forward_backward", "failed", 0.02, 0.5, 300, "m")
    metrics.operation("optim_step", "done", -0.001, 0.01, 0, "m")
    assert value(metrics, "tinkex_operations_total", kind="forward_backward", outcome="done") == 1
    assert value(metrics, "tinkex_operations_total", kind="forward_backward", outcome="failed") == 1
    assert value(metrics, "tinkex_operation_engine_seconds_sum", kind="forward_backward") == 2.0
    assert value(metrics, "tinkex_operation_queue_seconds_count", kind="optim_step") == 1
    assert value(metrics, "tinkex_trained_tokens_total", base_model="m", kind="forward_backward") == 300
    assert value(metrics, "tinkex_trained_tokens_total", base_model="m", kind="optim_step") is None


def test_a_sample_is_counted_with_its_tokens() -> None:
    metrics = Metrics()
    metrics.sample("done", 10, 64, "m")
    metrics.sample("cancelled", 10, 0, "m")
    assert value(metrics, "tinkex_samples_total", outcome="done") == 1
    assert value(metrics, "tinkex_samples_total", outcome="cancelled") == 1
    assert value(metrics, "tinkex_sampled_tokens_total", base_model="m") == 64
    assert value(metrics, "tinkex_prompt_tokens_total", base_model="m") == 10


def test_requests_are_counted_by_endpoint_status_and_time() -> None:
    metrics = Metrics()
    for status in (200, 200, 429):
        metrics.request("asample", status, 0.004)
    assert value(metrics, "tinkex_requests_total", endpoint="asample", status="200") == 2
    assert value(metrics, "tinkex_requests_total", endpoint="asample", status="429") == 1
    assert value(metrics, "tinkex_request_seconds_bucket", endpoint="asample", le="0.005") == 3
    assert value(metrics, "tinkex_request_seconds_bucket", endpoint="asample", le="0.0025") == 0


def test_only_the_first_tenants_get_their_own_label() -> None:
    metrics = Metrics()
    for number in range(MAX_NAMED_TENANTS + 10):
        for _ in range(2):
            metrics.request("asample", 200, 0.001, f"tenant-{number}")
    assert value(metrics, "tinkex_tenant_requests_total", tenant="tenant-0") == 2
    assert value(metrics, "tinkex_tenant_requests_total", tenant="other") == 20
    assert f"tenant-{MAX_NAMED_TENANTS}" not in generate_latest(metrics.registry).decode()


def test_two_services_in_one_process_count_apart() -> None:
    one, two = Metrics(), Metrics()
    one.sample("done", 1, 1, "m")
    assert value(two, "tinkex_samples_total", outcome="done") is None


# ── The page


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def engine(loop: Loop) -> FakeEngine:
    async def make() -> FakeEngine:
        return FakeEngine()

    return loop.call(make())


def service_in(folder: Path, loop: Loop, engine: FakeEngine, keys: tuple[str, ...] = ()) -> Service:
    config = ServeConfig(data_dir=folder, cache_dir=folder, api_keys=keys)
    store = Store.open(config.database_url, folder)
    model = ModelInfo(name="tinkex/tiny", folder=str(folder), vocab_size=263, max_context_length=2048)

    async def make() -> Service:
        return build(config, [model], store, engine)

    return loop.call(make())


def page(address: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    connection.request("GET", "/metrics", headers={name.replace("_", "-"): text for name, text in headers.items()})
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, response.headers["content-type"], content


def test_the_page_has_the_state_of_the_service(tmp_path: Path, loop: Loop, engine: FakeEngine) -> None:
    service = service_in(tmp_path, loop, engine)
    service.store.add_checkpoint(checkpoint("tinker://r/sampler_weights/one", "local"))
    engine.generation = 3
    service.metrics.request("asample", 200, 0.01, "local")
    with loop.serve(make_app(service)) as address:
        status, content_type, content = page(address)
    assert status == 200 and content_type.startswith("text/plain")
    samples = [sample for family in parse(content) for sample in family.samples]
    read = {sample.name: sample.value for sample in samples}
    assert read["tinkex_engine_ready"] == 1
    assert read["tinkex_engine_restarts_total"] == 2
    assert read["tinkex_engine_adapters"] == 0
    assert read["tinkex_operations_queued"] == 0
    assert read["tinkex_samples_running"] == 0 and read["tinkex_samples_queued"] == 0
    assert read["tinkex_checkpoints"] == 1 and read["tinkex_checkpoint_bytes"] == 1
    assert {sample.labels["tenant"] for sample in samples if "tenant" in sample.labels} == {"local", "other"}
    service.db.close()
    service.store.close()


def test_the_page_is_openmetrics_on_request(tmp_path: Path, loop: Loop, engine: FakeEngine) -> None:
    service = service_in(tmp_path, loop, engine)
    with loop.serve(make_app(service)) as address:
        _, content_type, content = page(address, accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = cast(Any, parse_openmetrics)(content)
    assert {"tinkex_engine_restarts", "tinkex_requests"} <= {family.name for family in families}
    service.db.close()
    service.store.close()


def test_with_keys_the_metrics_page_needs_one_and_contains_none(tmp_path: Path, loop: Loop, engine: FakeEngine) -> None:
    service = service_in(tmp_path, loop, engine, (KEY,))
    with loop.serve(make_app(service)) as address:
        assert page(address)[0] == 401
        assert page(address, x_api_key="tml-wrong-0123456789")[0] == 401
        status, _, content = page(address, authorization=f"Bearer {KEY}")
        assert status == 200
        assert KEY not in page(address, x_api_key=KEY)[2] and KEY not in content
    assert 'tinkex_unauthorised_requests_total{reason="no_key"} 1.0' in content
    assert 'tinkex_unauthorised_requests_total{reason="wrong_key"} 1.0' in content
    service.db.close()
    service.store.close()


def test_a_tenant_sees_its_own_metrics_and_sums_of_others(tmp_path: Path, loop: Loop, engine: FakeEngine) -> None:
    alice, bob = "tml-alice-0123456789", "tml-bob-0123456789ab"
    service = service_in(tmp_path, loop, engine, keys=(alice, bob))
    names = [loop.call(service.access.tenant(key)) for key in (alice, bob)]
    for name in names:
        service.metrics.request("asample", 200, 0.01, name)
    with loop.serve(make_app(service)) as address:
        _, _, content = page(address, x_api_key=alice)
    assert names[0] in content and names[1] not in content
    assert 'tinkex_requests_total{endpoint="asample",status="200"} 2.0' in content
