"""The choice of the next tenant and operation, without a loop."""

from __future__ import annotations

from tinkex.server.training.scheduler import Ready, Shares, choose, describe_queue


def test_the_tenant_that_was_charged_least_is_next() -> None:
    shares = Shares({"greedy": 1000.0, "modest": 10.0})
    assert choose([Ready("a", "greedy", 0.0), Ready("b", "modest", 9.0)], shares) == Ready("b", "modest", 9.0)


def test_within_a_tenant_the_one_that_waits_longest_is_next() -> None:
    assert choose([Ready("a", "t", 5.0), Ready("b", "t", 3.0)], Shares()) == Ready("b", "t", 3.0)


def test_a_flood_of_one_tenant_leaves_every_second_turn_to_the_other() -> None:
    shares, order = Shares(), []
    ready = [Ready(f"flood{n}", "flood", float(n)) for n in range(20)] + [Ready("one", "quiet", 99.0)]
    for _ in range(8):
        chosen = choose(ready, shares)
        assert chosen is not None
        order.append(chosen.tenant)
        shares.charge(chosen.tenant, 100)
    assert order.count("quiet") == 4


def test_fairness_counts_tokens_and_not_calls() -> None:
    shares, served = Shares(), {"long": 0, "short": 0}
    for _ in range(110):
        chosen = choose([Ready("l", "long", 0.0), Ready("s", "short", 0.0)], shares)
        assert chosen is not None
        tokens = 1000 if chosen.tenant == "long" else 100
        served[chosen.tenant] += tokens
        shares.charge(chosen.tenant, tokens)
    assert abs(served["long"] - served["short"]) <= 1000


def test_a_tenant_that_comes_back_has_no_credit_from_its_absence() -> None:
    shares = Shares({"busy": 5000.0})
    choose([Ready("b", "busy", 0.0)], shares)
    assert shares.pick(["busy", "back"]) in ("busy", "back")
    assert shares.charged["back"] == shares.charged["busy"]


def test_without_ready_operations_none_is_chosen() -> None:
    assert choose([], Shares()) is None


def test_the_reason_for_waiting_names_what_is_waited_for() -> None:
    assert describe_queue(0, None, None, "disk full")[0] == "paused_capacity"
    assert "loading" in describe_queue(0, None, "loading tiny", None)[1]
    assert describe_queue(2, 7, None, None) == ("active", "waits for operation 7 of this run, which has not arrived")
    assert describe_queue(2, None, None, None)[1].startswith("2 operations")
