"""The order of a run's operations, without a loop: numbers, gaps, rejections, restarts."""

from __future__ import annotations

import random

from tinkex.server.training.run_queue import PendingOperation, RunQueue, Taken
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


def pending(seq_id: int, arrived: float = 0.0) -> PendingOperation:
    return PendingOperation(row(seq_id, "queued"), arrived)


def run_all(queue: RunQueue, now: float) -> list[int]:
    ran = []
    while (head := queue.head(now, GAP_S)[0]) is not None:
        queue.start(head)
        ran.append(head.row.seq_id)
        queue.running = None
    return ran


def test_operations_run_by_number_whatever_their_order_of_arrival() -> None:
    for seed in range(20):
        queue, numbers = RunQueue(RUN), list(range(50))
        random.Random(seed).shuffle(numbers)
        ran: list[int] = []
        for number in numbers:
            queue.add(pending(number))
            ran += run_all(queue, 0.0)
        assert ran == list(range(50))


def test_one_operation_runs_at_a_time() -> None:
    queue = RunQueue(RUN)
    queue.add(pending(0))
    queue.add(pending(1))
    head = queue.head(0.0, GAP_S)[0]
    assert head is not None
    queue.start(head)
    assert queue.head(0.0, GAP_S) == (None, None)


def test_a_missing_number_is_awaited_and_then_skipped() -> None:
    queue = RunQueue(RUN)
    queue.add(pending(0))
    run_all(queue, 0.0)
    queue.add(pending(2, arrived=5.0))
    assert queue.missing(2) == 1
    assert queue.head(5.0, GAP_S) == (None, 15.0)
    assert run_all(queue, 15.0) == [2]
    assert queue.is_late(1)


def test_a_rejected_number_is_not_awaited() -> None:
    queue = RunQueue(RUN)
    queue.add(pending(0))
    run_all(queue, 0.0)
    queue.taken[1] = Taken("op-1", "", is_rejected=True)
    queue.taken[2] = Taken("op-2", "", is_rejected=True)
    queue.add(pending(3))
    assert run_all(queue, 0.0) == [3]


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


def test_a_restored_queue_continues_where_the_journal_stops() -> None:
    states = ["done", "failed", "done", "queued", "refused", "queued"]
    queue = RunQueue.restored(RUN, [row(number, state) for number, state in enumerate(states)], 0.0)
    assert run_all(queue, 0.0) == [3, 5]
    assert queue.taken[2].digest == "d2"
    assert queue.next_number() == 6


def test_a_number_rejected_before_a_restart_makes_no_other_late() -> None:
    queue = RunQueue.restored(RUN, [row(0, "done"), row(3, "refused")], 0.0)
    for number in (1, 2):
        assert not queue.is_late(number)
        queue.add(pending(number))
    queue.add(pending(4))
    assert run_all(queue, 0.0) == [1, 2, 4]


def test_an_operation_that_was_late_before_a_restart_does_not_run_after_it() -> None:
    queue = RunQueue.restored(RUN, [row(0, "done"), row(1, "queued"), row(2, "done"), row(3, "queued")], 0.0)
    assert run_all(queue, 0.0) == [3]


def test_a_queue_remembers_its_last_numbers_and_its_creation() -> None:
    queue = RunQueue(RUN)
    for number in range(100):
        queue.add(pending(number))
    run_all(queue, 0.0)
    queue.add(pending(100))
    queue.forget(10)
    assert list(queue.taken) == [0, *range(91, 101)]
    queue.forget(0)
    assert list(queue.taken) == [0, 99, 100], "neither what ran last nor what waits is forgotten"


def test_a_queue_takes_the_same_memory_however_long_its_run() -> None:
    """Before: 10,000 numbers of each run were remembered, 4 MB."""
    queue = RunQueue(RUN)
    for number in range(1000):
        queue.add(pending(number))
        run_all(queue, 0.0)
    assert len(queue.taken) <= 256


def test_operations_ahead_are_counted() -> None:
    queue = RunQueue(RUN)
    for number in range(4):
        queue.add(pending(number))
    head = queue.head(0.0, GAP_S)[0]
    assert head is not None
    queue.start(head)
    assert queue.ahead(3) == 3
