"""Some of the steps of a long run are what they are in the list of all, with the sums of those between them."""

from __future__ import annotations

import itertools

import pytest
from sqlalchemy import insert

from tests.unit.store.conftest import operation, run
from tinkex.server.training.steps import picked, steps_of
from tinkex.store.database import values_of
from tinkex.store.records import OperationRecord
from tinkex.store.store import Store
from tinkex.store.tables import operations

RUN = "s:train:0"


def journal(steps: int) -> list[OperationRecord]:
    """Steps of one to three passes, some with an evaluation, some with a failed pass, some after a save."""
    rows = [operation(0, RUN, kind="create_model", state="done", finished_at=10.0)]

    def add(kind: str, tokens: int = 0, metrics: dict[str, float] | None = None, state: str = "done") -> None:
        number = len(rows)
        row = operation(
            number, RUN, kind=kind, state=state, tokens=tokens, engine_s=0.25, metrics=metrics,
            finished_at=12.0 + 1.5 * number,
        )  # fmt: skip
        rows.append(row)

    for step in range(1, steps + 1):
        for part in range(1 + step % 3):
            add("forward_backward", 10 * step + part, {"loss:sum": 9.0 + part, "weight:sum": float(step)})
        if step % 5 == 0:
            add("forward", 7, {"loss:sum": 4.0, "weight:sum": 2.0})
        if step % 11 == 0:
            add("forward_backward", 5, state="failed")
        if step % 7 == 0:
            add("save_weights")
        add("optim_step", 0, {"learning_rate": 1e-3 / step, "grad_norm:max": float(step)})
    return rows


@pytest.mark.parametrize(("every", "first"), [(1, 0), (7, 0), (9, 23), (40, 0), (100, 39)])
def test_picked_steps_are_those_of_the_whole_list_with_the_sums_between_them(
    store: Store, every: int, first: int
) -> None:
    rows = journal(40)
    store.add_run(run(RUN), rows[0], b"")
    with store._write() as connection:
        connection.execute(insert(operations), [values_of(row) for row in rows[1:]])
    every_step, _ = steps_of(rows)
    after = every_step[first - 1]["seq_id"] if first else -1
    wanted = every_step[first:]
    end = store.last_done(RUN) + 1
    total = store.count_steps(RUN, after, end)
    assert total == len(wanted)
    found = picked(store.pick_steps(RUN, after, end, total, every))
    assert [step["number"] for step in found] == list(range(total, 0, -every))[::-1]
    for step in found:
        whole = wanted[step["number"] - 1]
        assert {name: step[name] for name in whole} == whole
        until = list(itertools.islice(wanted, step["number"]))
        assert step["tokens_so_far"] == sum(entry["tokens"] for entry in until)


def test_a_step_that_still_waits_is_not_picked(store: Store) -> None:
    rows = journal(3)
    store.add_run(run(RUN), rows[0], b"")
    with store._write() as connection:
        waiting = operation(len(rows), RUN, kind="optim_step", state="queued")
        connection.execute(insert(operations), [values_of(row) for row in (*rows[1:], waiting)])
    assert store.count_steps(RUN, -1, store.last_done(RUN) + 1) == 3
