"""The order of a run, without a loop: numbers, gaps, refusals, restarts."""

from __future__ import annotations

import random

from tinkex.server.training.run_queue import Lane, Pending
from tinkex.store.records import OperationRecord, RunRecord

RUN = RunRecord(
    id="s:train:0",
    tenant="t",
    session_id="s",
    base_model="tinkex/tiny",
    rank=8,
    seed=1,
    train_attn=True,
    train_mlp=True,
    train_unembed=True,
    created_at=0.0,
    last_request_at=0.0,
)
GAP_S = 10.0


def pending(seq_id: int, arrived: float = 0.0) -> Pending:
    return Pending(f"op-{seq_id}", RUN.id, "t", seq_id, "optim_step", arrived)


def run_all(lane: Lane, now: float) -> list[int]:
    ran = []
    while (head := lane.head(now, GAP_S)[0]) is not None:
        lane.start(head, now)
        ran.append(head.seq_id)
        lane.done()
    return ran


def test_operations_run_by_number_whatever_their_order_of_arrival() -> None:
    for seed in range(20):
        lane, numbers = Lane(RUN), list(range(50))
        random.Random(seed).shuffle(numbers)
        ran: list[int] = []
        for number in numbers:
            lane.add(pending(number), "d")
            ran += run_all(lane, 0.0)
        assert ran == list(range(50))


def test_one_operation_runs_at_a_time() -> None:
    lane = Lane(RUN)
    lane.add(pending(0), "a")
    lane.add(pending(1), "b")
    head = lane.head(0.0, GAP_S)[0]
    assert head is not None
    lane.start(head, 0.0)
    assert lane.head(0.0, GAP_S) == (None, None)


def test_a_missing_number_is_awaited_and_then_skipped() -> None:
    lane = Lane(RUN)
    lane.add(pending(0), "a")
    run_all(lane, 0.0)
    lane.add(pending(2, arrived=5.0), "c")
    assert lane.missing(2) == 1
    assert lane.head(5.0, GAP_S) == (None, 15.0)
    assert run_all(lane, 15.0) == [2]
    assert lane.is_late(1)


def test_a_refused_number_is_not_awaited() -> None:
    lane = Lane(RUN)
    lane.add(pending(0), "a")
    run_all(lane, 0.0)
    lane.refuse(1, "op-1", "")
    lane.refuse(2, "op-2", "")
    lane.add(pending(3), "d")
    assert run_all(lane, 0.0) == [3]


def row(seq_id: int, state: str) -> OperationRecord:
    return OperationRecord(
        request_id=f"op-{seq_id}",
        run_id=RUN.id,
        tenant="t",
        seq_id=seq_id,
        kind="optim_step",
        digest=f"d{seq_id}",
        state=state,  # type: ignore[arg-type]
    )


def test_a_restored_lane_goes_on_where_the_journal_stops() -> None:
    states = ["done", "failed", "done", "queued", "refused", "queued"]
    lane = Lane.restored(RUN, [row(number, state) for number, state in enumerate(states)], 0.0)
    assert run_all(lane, 0.0) == [3, 5]
    assert lane.taken[2].digest == "d2"
    assert lane.next_number() == 6


def test_a_number_that_was_refused_before_a_restart_makes_no_other_one_late() -> None:
    lane = Lane.restored(RUN, [row(0, "done"), row(3, "refused")], 0.0)
    for number in (1, 2):
        assert not lane.is_late(number)
        lane.add(pending(number), "d")
    lane.add(pending(4), "d")
    assert run_all(lane, 0.0) == [1, 2, 4]


def test_what_came_too_late_before_a_restart_does_not_run_after_it() -> None:
    lane = Lane.restored(RUN, [row(0, "done"), row(1, "queued"), row(2, "done"), row(3, "queued")], 0.0)
    assert run_all(lane, 0.0) == [3]


def test_a_lane_remembers_its_last_numbers_and_its_creation() -> None:
    lane = Lane(RUN)
    for number in range(100):
        lane.add(pending(number), "d")
    run_all(lane, 0.0)
    lane.add(pending(100), "d")
    lane.forget(10)
    assert list(lane.taken) == [0, *range(91, 101)]
    lane.forget(0)
    assert list(lane.taken) == [0, 99, 100], "neither what ran last nor what waits is forgotten"


def test_what_is_ahead_is_counted() -> None:
    lane = Lane(RUN)
    for number in range(4):
        lane.add(pending(number), "d")
    head = lane.head(0.0, GAP_S)[0]
    assert head is not None
    lane.start(head, 0.0)
    assert lane.ahead(3) == 3
