"""Which node gets a run, which draws a sample, what leaves a node with too much; and all of it in simulated time."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cluster_simulation import POLICIES, Policy, at_random, ours, simulate
from tinkex.server.cluster.placement import (
    MOVED_AT_ONCE,
    QUEUED_ROWS,
    engines_text,
    node_for_run,
    node_for_sample,
    runs_to_give_up,
)
from tinkex.store.cluster.cluster_store import NodeFacts, NodeRecord


def node(name: str, samples: int = 0, operations: int = 0, is_ready: bool = True, **given: Any) -> NodeRecord:
    facts = NodeFacts(samples=samples, operations=operations, is_ready=is_ready)
    told = {"url": f"http://{name}", "models": ("tiny",), "version": "1.0", "left_s": 15.0}
    return NodeRecord(id=name, facts=facts, **{**told, **given})


def chosen(*nodes: NodeRecord, model: str = "tiny", own: str = "") -> str | None:
    found = node_for_run(nodes, model, own)
    return None if found is None else found.id


# ── Runs


def test_a_run_goes_to_the_node_with_the_fewest() -> None:
    assert chosen(node("a", runs=3), node("b", runs=2, operations=50), node("c", runs=4)) == "b"


def test_runs_that_train_or_have_just_come_count_more_than_idle_ones() -> None:
    """A node that has come back would get every run of a burst, until it has as many as the others."""

    def told(name: str, runs: int, busy: int, before: int) -> NodeRecord:
        return replace(node(name, runs=runs), facts=NodeFacts(busy=busy, runs=before))

    idle = told("a", 30, 0, 30)
    assert chosen(idle, told("b", 9, 9, 9)) == "b"
    assert chosen(idle, told("b", 11, 11, 11)) == "a"
    assert chosen(idle, told("b", 11, 0, 0)) == "a", "eleven that came since it has renewed"
    assert chosen(idle, told("b", 11, 0, 20)) == "b", "it has given some up since"


def test_of_equals_the_newest_release_then_the_node_that_was_asked() -> None:
    assert chosen(node("a"), node("b"), node("c"), own="b") == "b"
    assert chosen(node("a", version="1.9.0"), node("b", version="1.10.0"), own="a") == "b"
    assert chosen(node("a", version="1.9.0"), node("b", version="1.10.0", runs=1), own="a") == "a"
    assert chosen(node("b"), node("a")) == chosen(node("a"), node("b")) == "a", "whatever the order of the rows"


def test_a_run_goes_to_no_node_that_drains_or_has_not_its_model_or_only_samples() -> None:
    others = (node("a", is_draining=True), node("b", models=("other",)), node("c", kind="sample"))
    assert chosen(*others) is None
    assert chosen(*others, node("d", runs=99)) == "d"
    assert chosen(*others, model="other") == "b"


def test_a_node_that_starts_or_renews_late_is_passed_over_while_there_are_others() -> None:
    starting, late = node("a", is_ready=False), node("b", left_s=4.9)
    assert chosen(starting, late, node("c", runs=50)) == "c"
    assert chosen(starting, late) == "b"
    assert chosen(starting) == "a"
    assert chosen(node("a", left_s=0.2), node("b", left_s=0.3, runs=1)) == "a", "all renew at this moment"


# ── Samples


def keys_to_nodes(*nodes: NodeRecord, keys: int = 400) -> list[str]:
    found = [node_for_sample(nodes, f"key {number}", "tiny") for number in range(keys)]
    return [one.id for one in found if one is not None]


def test_samples_that_begin_alike_meet_and_only_those_of_a_lost_node_move() -> None:
    nodes = [node(f"n{number}") for number in range(4)]
    before = keys_to_nodes(*nodes)
    assert before == keys_to_nodes(*nodes[::-1])
    assert all(60 < count < 140 for count in Counter(before).values())
    after = keys_to_nodes(*nodes[:3])
    assert [new for old, new in zip(before, after, strict=True) if old != "n3"] == [
        one for one in before if one != "n3"
    ]
    assert set(after) == {"n0", "n1", "n2"}


def test_a_node_with_much_more_than_the_others_is_passed_over_and_its_keys_spread() -> None:
    nodes = [node(f"n{number}", samples=400) for number in range(4)]
    before = keys_to_nodes(*nodes)
    after = keys_to_nodes(replace(nodes[0], facts=NodeFacts(samples=800)), *nodes[1:])
    moved = Counter(new for old, new in zip(before, after, strict=True) if old == "n0")
    assert "n0" not in after and set(moved) == {"n1", "n2", "n3"}
    assert [new for old, new in zip(before, after, strict=True) if old != "n0"] == [
        one for one in before if one != "n0"
    ]
    assert keys_to_nodes(replace(nodes[0], facts=NodeFacts(samples=520)), *nodes[1:]) == before, (
        "a fifth more is not much"
    )


def test_a_node_with_fewer_than_an_engine_draws_at_once_is_never_passed_over() -> None:
    idle = [node(f"n{number}") for number in range(3)]
    assert keys_to_nodes(*idle, node("n3", samples=QUEUED_ROWS)) == keys_to_nodes(*idle, node("n3"))


def test_a_sample_goes_to_a_draining_node_only_if_no_other_has_its_model() -> None:
    draining, other = node("a", is_draining=True), node("b", models=("other",))
    assert set(keys_to_nodes(draining, other, node("c"))) == {"c"}
    assert set(keys_to_nodes(draining, other)) == {"a"}
    assert node_for_sample([other], "key", "tiny") is None
    assert node_for_sample([node("a")], "key", "tiny", without=("http://a",)) is None


def test_samples_leave_nodes_that_train_to_their_training_while_others_only_sample() -> None:
    training, sampling = [node("a"), node("b")], [node("c", kind="sample"), node("d", kind="sample", samples=500)]
    assert set(keys_to_nodes(*training, *sampling)) == {"c"}, "d has far more to do"
    starting = [replace(entry, facts=NodeFacts(is_ready=False)) for entry in sampling]
    assert set(keys_to_nodes(*training, *starting)) == {"a", "b"}
    assert set(keys_to_nodes(*training, node("c", kind="sample", models=("other",)))) == {"a", "b"}


# ── Moving


def test_a_node_with_far_more_runs_gives_some_up_idle_ones_first() -> None:
    waiting = {f"r{number}": number % 3 for number in range(20)}
    leaving = runs_to_give_up("a", [node("a", runs=20), node("b", runs=2)], waiting)
    assert len(leaving) == MOVED_AT_ONCE and {waiting[run_id] for run_id in leaving} == {0}


@pytest.mark.parametrize("others", [(18,), (17, 16), (12,), ()])
def test_runs_stay_where_the_difference_is_small(others: tuple[int, ...]) -> None:
    nodes = [node(f"n{number}", runs=runs) for number, runs in enumerate(others)]
    assert runs_to_give_up("a", [node("a", runs=20), *nodes], {f"r{number}": 0 for number in range(20)}) == []


def test_moving_ends_and_does_not_go_back_and_forth() -> None:
    runs = {"a": 40, "b": 0, "c": 11}
    for _ in range(100):
        nodes = [node(name, runs=count) for name, count in runs.items()]
        leaving = {name: len(runs_to_give_up(name, nodes, {f"{n}": 0 for n in range(runs[name])})) for name in runs}
        if not any(leaving.values()):
            break
        for name, count in leaving.items():
            for _ in range(count):
                runs[name] -= 1
                target = node_for_run([node(one, runs=held) for one, held in runs.items()], "tiny")
                assert target is not None and target.id != name
                runs[target.id] += 1
    assert sum(runs.values()) == 51 and max(runs.values()) - min(runs.values()) <= 8


@pytest.mark.parametrize(("idle", "busy", "moves"), [(30, 15, 0), (20, 8, 0), (60, 30, 0), (60, 10, MOVED_AT_ONCE)])
def test_idle_runs_do_not_leave_a_node_that_would_get_them_back(idle: int, busy: int, moves: int) -> None:
    """Before: by number it had too many, by weight the least: four left and came back, every five seconds."""
    first = replace(node("a", runs=idle), facts=NodeFacts(runs=idle))
    second = replace(node("b", runs=busy), facts=NodeFacts(runs=busy, busy=busy))
    leaving = runs_to_give_up("a", [first, second], {f"r{number}": 0 for number in range(idle)})
    assert len(leaving) == moves
    for number in range(1, moves + 1):
        fewer = replace(first, runs=idle - number, facts=NodeFacts(runs=idle - number))
        assert chosen(fewer, replace(second, runs=busy + number - 1), own="a") == "b"


def test_runs_do_not_leave_for_nodes_that_cannot_have_them() -> None:
    waiting = {f"r{number}": 0 for number in range(20)}
    others = (
        node("b", is_draining=True),
        node("c", models=("other",)),
        node("d", is_ready=False),
        node("e", kind="sample"),
    )
    assert runs_to_give_up("a", [node("a", runs=20), *others], waiting) == []
    assert runs_to_give_up("gone", [node("a"), node("b")], waiting) == []


# ── What users wait for


def test_a_poll_says_what_the_engines_do() -> None:
    busy = [node(f"n{number}", operations=1) for number in range(3)]
    assert engines_text([*busy, node("s", is_ready=False)]) == "3 engines busy, 1 starting"
    assert engines_text([node("a", samples=1)]) == "1 engine busy"
    assert engines_text([node("a"), node("b", is_draining=True)]) == "1 engine idle, 1 draining"
    assert engines_text([]) == "no engine"


# ── In simulated time


def small(policy: Policy, seed: int) -> Any:
    return simulate(policy, engines=8, tenants=120, seed=seed, minutes=5)


def test_placement_beats_chance_in_simulated_time() -> None:
    """It fails if a function of the product is replaced by random choice."""
    seeds = range(4)
    placed = [small(POLICIES["ours"], seed) for seed in seeds]
    random = [small(Policy(at_random), seed) for seed in seeds]
    assert statistics.mean(one.slow for one in placed) < 0.8 * statistics.mean(one.slow for one in random)
    assert statistics.mean(one.spread for one in placed) < 0.8 * statistics.mean(one.spread for one in random)
    assert min(len(one.equal_minutes) for one in placed) == 32, "every job ends"


def test_a_simulation_is_the_same_for_the_same_seed() -> None:
    first, again, other = (simulate(Policy(ours, moves=True), 4, 60, seed, 3) for seed in (1, 1, 2))
    assert first == again != other
