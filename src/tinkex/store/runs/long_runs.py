"""Reads some of the steps of a long run: as many as a plot has room for, without reading the others."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Select, and_, bindparam, func, select
from sqlalchemy.sql.expression import CTE

from tinkex.store.database import Database
from tinkex.store.records import OperationRecord
from tinkex.store.tables import operations

# A literal and not a parameter: otherwise SQLite does not use the partial index.
_IS_STEP = operations.c.kind == bindparam("step_kind", "optim_step", literal_execute=True)


class PickedStep(NamedTuple):
    """One of the steps that were picked."""

    number: int
    """Which of the steps in the range it is; the first is 1."""
    before: OperationRecord | None
    """The operation before its first."""
    rows: list[OperationRecord]
    """Its operations, by number."""
    tokens: int
    """Of all operations since the step that was picked before, as are the seconds in the engine."""
    seconds: float


class LongRunStore(Database):
    def count_steps(self, run_id: str, after_seq: int, before_seq: int) -> int:
        """Return how many steps ended after one number and before another."""
        return self._count(select(func.count()).select_from(_ends(run_id, after_seq, before_seq).subquery()))

    def last_done(self, run_id: str) -> int:
        """Return the number of the last operation that is done. None before it is still to come: they run in order."""
        done = select(operations.c.seq_id).where(operations.c.run_id == run_id, operations.c.state == "done")
        with self._read() as connection:
            last = connection.scalar(done.order_by(operations.c.seq_id.desc()).limit(1))
        return -1 if last is None else int(last)

    def pick_steps(self, run_id: str, after_seq: int, before_seq: int, total: int, every: int) -> list[PickedStep]:
        """Return every n-th of these `total` steps, counted from the last, which is always one of them."""
        picked = _picked(run_id, after_seq, before_seq, total, every)
        of_run = operations.c.run_id == run_id
        of_step = and_(of_run, operations.c.seq_id >= picked.c.previous, operations.c.seq_id <= picked.c.last)
        since = and_(
            of_run,
            operations.c.seq_id > picked.c.previous_picked,
            operations.c.seq_id <= picked.c.last,
            operations.c.state == "done",
        )
        rows = select(operations, picked.c.number, picked.c.previous).join(picked, of_step)
        tokens, seconds = func.sum(operations.c.tokens), func.sum(operations.c.engine_s)
        sums = select(picked.c.number, tokens, seconds).join(operations, since).group_by(picked.c.number)
        found: dict[int, list[OperationRecord]] = {}
        before: dict[int, OperationRecord] = {}
        with self._read() as connection:
            for row in connection.execute(rows.order_by(operations.c.seq_id)).mappings():
                record = OperationRecord(**{name: row[name] for name in OperationRecord.__slots__})
                if record.seq_id == row["previous"]:
                    before[row["number"]] = record
                else:
                    found.setdefault(row["number"], []).append(record)
            totals = {number: (int(a or 0), float(b or 0.0)) for number, a, b in connection.execute(sums)}
        return [
            PickedStep(number, before.get(number), found[number], *totals.get(number, (0, 0.0)))
            for number in sorted(found)
        ]


def _ends(run_id: str, after_seq: int, before_seq: int) -> Select[Any]:
    in_range = (operations.c.run_id == run_id, operations.c.seq_id > after_seq, operations.c.seq_id < before_seq)
    return select(operations.c.seq_id).where(*in_range, _IS_STEP)


def _picked(run_id: str, after_seq: int, before_seq: int, total: int, every: int) -> CTE:
    by_seq = operations.c.seq_id
    ends = (
        _ends(run_id, after_seq, before_seq)
        .add_columns(
            func.row_number().over(order_by=by_seq).label("number"),
            func.coalesce(func.lag(by_seq).over(order_by=by_seq), after_seq).label("previous"),
        )
        .subquery()
    )
    last = ends.c.seq_id
    return (
        select(
            ends.c.number,
            ends.c.previous,
            last.label("last"),
            func.coalesce(func.lag(last).over(order_by=last), after_seq).label("previous_picked"),
        )
        .where((total - ends.c.number) % every == 0)
        .cte("picked")
    )
