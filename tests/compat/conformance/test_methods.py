"""docs/compatibility.md says of every method what a real service does with it."""

from __future__ import annotations

import pytest

from tests.compat.conformance.methods import EXCUSES, OFFICIAL, OURS, PAGE, Found, outcome, outcomes, page, probe
from tests.compat.conformance.probes import __main__ as probes
from tests.compat.conformance.probes.service import TELEMETRY_EVENT
from tests.integration.service.conftest import live as live
from tests.integration.service.live import LiveServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(live: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return {client: probe(client, live.url, tmp_path_factory.mktemp(client)) for client in (OFFICIAL, OURS)}


def test_every_failure_is_a_listed_exception(found: dict[str, Found]) -> None:
    assert [row for row in outcomes(found) if row[2].startswith("fails")] == []


def test_every_listed_exception_is_still_one(found: dict[str, Found]) -> None:
    for client, excuses in EXCUSES.items():
        explained = {
            name for one, name, result in outcomes(found) if one == client and result in ("refused", "stopped")
        }
        assert excuses.keys() <= explained


def test_the_compatibility_page_shows_the_measured_results(found: dict[str, Found]) -> None:
    assert page(found) == PAGE.read_text(encoding="utf-8"), "python -m tests.compat.conformance.methods --write"


def test_the_service_takes_the_official_client_s_telemetry(found: dict[str, Found], live: LiveServer) -> None:
    assert TELEMETRY_EVENT in (live.data_dir / "telemetry.jsonl").read_text(encoding="utf-8")


def test_a_method_without_a_probe_fails() -> None:
    class ServiceClient:
        def brand_new(self) -> None: ...

    class Release:
        __name__ = ServiceClient.__module__.partition(".")[0]
        TrainingClient = SamplingClient = RestClient = AdminClient = APIFuture = type("Empty", (), {})

    Release.ServiceClient = ServiceClient  # type: ignore[attr-defined]
    assert probes.public_methods(Release()) == ["ServiceClient.brand_new"]
    problem = probes._tried("ServiceClient.brand_new", None)  # type: ignore[arg-type]
    assert outcome(OFFICIAL, "ServiceClient.brand_new", problem).startswith("fails: no probe")
