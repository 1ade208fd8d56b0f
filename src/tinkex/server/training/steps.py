"""Sums up a run's journal by optimizer steps, for the console and `tinkex run watch`. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tinkex.rules.metrics import step_loss
from tinkex.server.http import views
from tinkex.store.records import OperationRecord

STEP_KINDS = frozenset({"forward", "forward_backward", "optim_step"})


def steps_of(operations: Iterable[OperationRecord], *, is_cut: bool = False) -> tuple[list[dict[str, Any]], int]:
    """Return the complete steps, and how many forward_backward calls follow the last of them.

    Operations after the last optim_step belong to the next step, which a later call will return; unless `is_cut` says
    that the list was cut there.
    """
    steps: list[dict[str, Any]] = []
    parts: list[OperationRecord] = []
    for row in operations:
        if row.kind in STEP_KINDS:
            parts.append(row)
        if row.kind == "optim_step":
            steps.append(_step(parts))
            parts = []
    if is_cut and parts and not steps:
        steps.append(_step(parts))  # thousands of passes without an optim_step: one step, or none would ever be shown
        parts = []
    return steps, sum(row.kind == "forward_backward" for row in parts)


def last_loss(operations: Iterable[OperationRecord]) -> float | None:
    """Return the loss of the last complete step."""
    steps, _ = steps_of(operations)
    return steps[-1]["loss"] if steps else None


def thinned(steps: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return every n-th step, so that at most `most` are left; the last step is always one of them."""
    every = math.ceil(len(steps) / max(most, 1))
    return steps if every <= 1 else steps[::-1][::every][::-1]


def _step(parts: list[OperationRecord]) -> dict[str, Any]:
    last = parts[-1]
    metrics: dict[str, float] = {}
    for row in parts:
        metrics |= row.metrics or {}
    rate = metrics.pop("learning_rate", None)
    return {
        "seq_id": last.seq_id,
        "time": views.time_text(last.finished_at or last.created_at),
        "loss": step_loss(row.metrics or {} for row in parts if row.kind == "forward_backward"),
        "evaluation_loss": step_loss(row.metrics or {} for row in parts if row.kind == "forward"),
        "learning_rate": rate,
        "tokens": sum(row.tokens for row in parts),
        "seconds": sum(row.engine_s or 0.0 for row in parts),
        "metrics": {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)},
    }
