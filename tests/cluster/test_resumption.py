"""How long a fault kept a tenant waiting, from histories written by hand."""

from __future__ import annotations

from tests.cluster.kinds import LEASE_S, MARGIN_S
from tests.cluster.resumption import resumptions
from tests.faults.history import Call, FaultRecord, History


def history(*ends_s: float) -> History:
    calls = [Call(tenant="alice", index=0, what="x", began_s=0.0, ended_s=end_s) for end_s in ends_s]
    return History(calls=calls, faults=[FaultRecord(what="kill node", began_s=10.0, ended_s=12.0)])


def test_the_longest_wait_after_a_fault_counts_and_not_the_first() -> None:
    [found] = resumptions(history(1.0, 9.0, 10.5, 17.5, 18.0))
    assert (found.what, found.seconds) == ("kill node", 7.0)


def test_what_a_tenant_waits_for_anyway_is_allowed_beside_the_bound() -> None:
    [found] = resumptions(history(1.0, 9.0, 11.0))
    assert found.most_s == LEASE_S + MARGIN_S + 8.0


def test_a_tenant_that_had_ended_waits_for_nothing() -> None:
    assert resumptions(history(1.0, 2.0)) == []
