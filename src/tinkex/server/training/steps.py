"""Sums up a run's journal by optimizer steps, for the console and `tinkex run watch`. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tinkex.rules.metrics import step_loss
from tinkex.server.http import views
from tinkex.server.training.pass_notes import custom_loss, loss_function, notes_of, surrogates
from tinkex.store.records import OperationRecord
from tinkex.store.runs.long_runs import PickedStep

STEP_KINDS = frozenset({"forward", "forward_backward", "optim_step"})


def steps_of(
    operations: Iterable[OperationRecord], *, is_cut: bool = False, before: OperationRecord | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Return the complete steps, and how many forward_backward calls follow the last of them.

    Operations after the last optim_step belong to the next step, which a later call will return; unless `is_cut` says
    that the list was cut there. A failed operation counts for its step. `before` is the operation before the first.
    """
    steps: list[dict[str, Any]] = []
    parts: list[OperationRecord] = []
    waited_s, free_at = 0.0, None if before is None else before.finished_at
    for row in operations:
        waited_s += _waited_s(row, free_at)
        free_at = row.finished_at or free_at
        if row.kind in STEP_KINDS:
            parts.append(row)
        if row.kind == "optim_step":
            steps.append(_step(parts, waited_s))
            parts, waited_s = [], 0.0
    if is_cut and parts and not steps:
        # Thousands of passes without an optim_step: one step, or none would ever be shown.
        steps.append(_step(parts, waited_s))
        parts = []
    return steps, sum(row.kind == "forward_backward" and row.state == "done" for row in parts)


def settled(operations: Sequence[OperationRecord], after_seq: int) -> list[OperationRecord]:
    """Return the operations up to a number that may still come: rejected ones may arrive before those in front of them.

    Nothing is missing before an operation that was executed: those are executed in the order of their numbers.
    """
    executed = [index for index, row in enumerate(operations) if row.state != "refused"]
    end = executed[-1] + 1 if executed else 0
    last = operations[end - 1].seq_id if end else max(after_seq, 0)
    while end < len(operations) and operations[end].seq_id == last + 1:
        last, end = last + 1, end + 1
    return list(operations[:end])


def last_loss(operations: Iterable[OperationRecord]) -> float | None:
    """Return the loss of the last complete step."""
    steps, _ = steps_of(operations)
    return steps[-1]["loss"] if steps else None


def picked(picks: Sequence[PickedStep]) -> list[dict[str, Any]]:
    """Return some of the steps of a long run, each with its number and what the run had come to when it ended."""
    steps: list[dict[str, Any]] = []
    tokens, seconds = 0, 0.0
    for pick in picks:
        tokens, seconds = tokens + pick.tokens, seconds + pick.seconds
        [*_, step], _ = steps_of(pick.rows, before=pick.before)
        steps.append({**step, "number": pick.number, "tokens_so_far": tokens, "seconds_so_far": seconds})
    return steps


def _step(parts: list[OperationRecord], waited_s: float) -> dict[str, Any]:
    last, done = parts[-1], [row for row in parts if row.state == "done"]
    failed = [row for row in parts if row.state != "done"]
    hidden = surrogates(done)
    metrics: dict[str, float | None] = {}
    for row in done:
        metrics |= row.metrics or {}
        if row.seq_id in hidden:
            metrics.pop("loss:sum", None)
            metrics.pop("weight:sum", None)
        if (returned := custom_loss(row)) is not None:
            metrics |= {**returned["metrics"], "loss:sum": returned["loss"]}
    rate = metrics.pop("learning_rate", None)
    return {
        "seq_id": last.seq_id,
        "time": views.time_text(last.finished_at or last.created_at),
        "loss": step_loss(_loss_of(row, hidden) for row in done if row.kind == "forward_backward"),
        "evaluation_loss": step_loss(_loss_of(row, hidden) for row in done if row.kind == "forward"),
        "loss_fn": loss_function(done, hidden),
        "learning_rate": rate,
        "optimizer": notes_of(last).get("optimizer") or {},
        "tokens": sum(row.tokens for row in done),
        "seconds": sum(row.engine_s or 0.0 for row in done),
        "queue_seconds": waited_s,
        "failed": len(failed),
        "failure": f"{failed[0].kind}: {failed[0].error or 'no reason was stored'}" if failed else "",
        "metrics": {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)},
    }


def _loss_of(row: OperationRecord, hidden: set[int]) -> dict[str, float | None]:
    """Return what a pass says about the loss of its step: for a custom loss, what the caller's function returned."""
    if (returned := custom_loss(row)) is not None:
        return {"loss:sum": returned["loss"]}
    return {} if row.seq_id in hidden else dict(row.metrics or {})


def _waited_s(row: OperationRecord, free_at: float | None) -> float:
    """Return how long an operation waited although the run had nothing else to do: others were in the engine."""
    if row.finished_at is None or row.engine_s is None:
        return 0.0
    return max(row.finished_at - row.engine_s - max(row.created_at, free_at or 0.0), 0.0)
