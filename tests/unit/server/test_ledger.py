"""The ledger of limits: who is rejected, with which words, and that nobody else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.server.http.errors import RequestRejected
from tinkex.server.limits.ledger import Ledger
from tinkex.settings import LIMITS, ServeConfig
from tinkex.testing.clock import FakeClock

DECOMPRESSED_PER_S = 1024


@pytest.fixture
def rejections() -> list[str]:
    return []


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: FakeClock, rejections: list[str]) -> Ledger:
    config = ServeConfig(
        data_dir=tmp_path,
        max_tenant_body_bytes=2000,
        max_all_body_bytes=3000,
        max_requests_per_s=10,
        max_decompressed_per_s=DECOMPRESSED_PER_S,
        max_uploads=1,
    )
    return Ledger(config, clock, rejections.append)


def test_a_tenant_over_its_own_limit_is_rejected_with_what_to_do(ledger: Ledger, rejections: list[str]) -> None:
    ledger.take("body_bytes", "bob", 1500, "bytes")
    with pytest.raises(RequestRejected) as raised:
        ledger.take("body_bytes", "bob", 501, "bytes")
    assert raised.value.status == 429 and raised.value.headers["retry-after"] == "1"
    assert raised.value.detail == (
        "This key would hold 2001 bytes, and the limit is 2000 (--max-tenant-body-bytes). "
        "Wait for earlier requests to return."
    )
    assert rejections == ["max_tenant_body_bytes"]
    ledger.take("body_bytes", "bob", 500, "bytes")


def test_what_a_block_held_is_free_after_it_however_it_ends(ledger: Ledger) -> None:
    with pytest.raises(KeyError), ledger.hold("uploads", "bob", 1, "uploads"):
        assert ledger.used("uploads", "bob") == ledger.total("uploads") == 1
        raise KeyError
    assert ledger.used("uploads", "bob") == ledger.total("uploads") == 0
    with ledger.hold("uploads", "bob", 1, "uploads"):
        pass


def test_a_full_service_rejects_the_tenant_that_uses_most_and_no_other(ledger: Ledger) -> None:
    ledger.take("body_bytes", "bob", 2000, "bytes")
    ledger.take("body_bytes", "carol", 1000, "bytes")
    ledger.take("body_bytes", "alice", 900, "bytes")  # the service is full, and she has less than a third
    for tenant in ("bob", "carol", "alice"):
        with pytest.raises(RequestRejected, match="limit is"):
            ledger.take("body_bytes", tenant, 200, "bytes")
    assert ledger.total("body_bytes") == 3900


def test_a_key_that_sends_too_much_waits_and_another_does_not(ledger: Ledger, clock: FakeClock) -> None:
    for _ in range(50):
        ledger.spend_request("bob")
    with pytest.raises(RequestRejected, match=r"10.0 \(--max-requests-per-s\)"):
        ledger.spend_request("bob")
    ledger.spend_request("alice")
    clock.advance(0.1)
    ledger.spend_request("bob")
    with pytest.raises(RequestRejected):
        ledger.spend_request("bob")


def test_a_key_whose_bodies_become_too_much_waits_and_another_does_not(ledger: Ledger, clock: FakeClock) -> None:
    """Before: bombs of a few kilobytes took half of the server's time, and nobody was charged for it."""
    ledger.check_decompressed("bob")
    ledger.charge_decompressed("bob", 20 * DECOMPRESSED_PER_S)  # one large body may exceed what is left
    with pytest.raises(
        RequestRejected, match=r"per second, and the limit is 1024 \(--max-decompressed-per-s"
    ) as raised:
        ledger.check_decompressed("bob")
    assert raised.value.status == 429 and raised.value.headers["retry-after"] == "5"
    ledger.check_decompressed("alice")
    clock.advance(3.9)
    with pytest.raises(RequestRejected):
        ledger.check_decompressed("bob")
    clock.advance(0.2)
    ledger.check_decompressed("bob")
    clock.advance(3600)
    ledger.charge_decompressed("bob", 16 * DECOMPRESSED_PER_S)
    with pytest.raises(RequestRejected):
        ledger.check_decompressed("bob")


def test_every_limit_is_a_setting_with_its_words() -> None:
    for limit in LIMITS:
        assert hasattr(ServeConfig, limit.setting.name) and limit.remedy.endswith(".")
        assert limit.status in (400, 408, 410, 413, 429, 503), "official clients retry other statuses, or none"
