"""The attacks of `benchmarks/hostile_clients.py` reach what they are made for."""

from __future__ import annotations

from benchmarks.hostile_clients import EXPECTED, HostileClient
from tests.integration.service.live import LiveServer


def test_no_attack_fails_before_it_reaches_its_target(live: LiveServer) -> None:
    """Before: two were rejected for their query, before the body was read; one repeated a field that costs nothing."""
    attacker = HostileClient(live.url, "tml-hostile-0123456789")
    attacker.bombs()
    assert attacker.statuses == {f"{name}: {status} {code}": 1 for name, (status, code, _) in EXPECTED.items()}
