"""The choice of the next tenant and operation, without a loop."""

from __future__ import annotations

from tinkex.server.training.run_queue import PendingOperation
from tinkex.server.training.scheduler import Shares, choose
from tinkex.store.records import OperationRecord


def ready(run_id: str, tenant: str, arrived: float) -> PendingOperation:
    row = OperationRecord(request_id=run_id, run_id=run_id, tenant=tenant, seq_id=1, kind="forward", digest="")
    return PendingOperation(row, arrived)


def test_the_tenant_that_was_charged_least_is_next() -> None:
    shares = Shares({"greedy": 1000.0, "modest": 10.0})
    modest = ready("b", "modest", 9.0)
    assert choose([ready("a", "greedy", 0.0), modest], shares) is modest


def test_within_a_tenant_the_one_that_waits_longest_is_next() -> None:
    longest = ready("b", "t", 3.0)
    assert choose([ready("a", "t", 5.0), longest], Shares()) is longest


def test_a_flood_of_one_tenant_leaves_every_second_turn_to_the_other() -> None:
    shares, order = Shares(), []
    operations = [ready(f"flood{n}", "flood", float(n)) for n in range(20)] + [ready("one", "quiet", 99.0)]
    for _ in range(8):
        chosen = choose(operations, shares)
        assert chosen is not None
        order.append(chosen.row.tenant)
        shares.charge(chosen.row.tenant, 100)
    assert order.count("quiet") == 4


def test_fairness_counts_tokens_and_not_calls() -> None:
    shares, served = Shares(), {"long": 0, "short": 0}
    for _ in range(110):
        chosen = choose([ready("l", "long", 0.0), ready("s", "short", 0.0)], shares)
        assert chosen is not None
        tokens = 1000 if chosen.row.tenant == "long" else 100
        served[chosen.row.tenant] += tokens
        shares.charge(chosen.row.tenant, tokens)
    assert abs(served["long"] - served["short"]) <= 1000


def test_a_tenant_that_comes_back_has_no_credit_from_its_absence() -> None:
    shares = Shares({"busy": 5000.0})
    choose([ready("b", "busy", 0.0)], shares)
    assert shares.pick(["busy", "back"]) in ("busy", "back")
    assert shares.charged["back"] == shares.charged["busy"]


def test_without_ready_operations_none_is_chosen() -> None:
    assert choose([], Shares()) is None
