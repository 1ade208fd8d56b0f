"""What the user's program logged for its runs: numbers and samples, in the order in which they came.

They are no operations: they change nothing of the run, so any server of a cluster may write them, and no fence is
needed. The row of the run is locked meanwhile, so that the numbers of entries have no gaps and none appears late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Row, Table, func, insert, or_, select

from tinkex.store.database import Database, bounded
from tinkex.store.tables import remembered_responses, run_metrics, run_samples, runs

PAGE_BYTES = 4 << 20
"""Of one page: it becomes Python objects and JSON at once."""
ROW_BYTES = 50
"""What a row takes besides its JSON, about."""


class NewRows(NamedTuple):
    """What one request brings: rows without their numbers, `{"step", "seq_id", "at", "metrics"}` and so on."""

    entries: Sequence[dict[str, Any]]
    samples: Sequence[dict[str, Any]]


class LoggedStore(Database):
    def add_logged(
        self,
        run_id: str,
        new: NewRows,
        check: Callable[[int, int], None],
        *,
        tenant: str,
        key: str,
        response: bytes,
        at: float,
    ) -> bytes | None:
        """Add entries and samples, and remember the response under the idempotency key, if there is one.

        Returns the response, of an earlier attempt if there was one; None if the run is gone. `check` gets the bytes
        that the run would then have, of entries and of samples, and raises if they are too many.
        """
        with self._write() as connection:
            if connection.scalar(select(runs.c.id).where(runs.c.id == run_id).with_for_update()) is None:
                return None
            if key:
                values = {"tenant": tenant, "key": key, "answer": response, "at": at}
                if not connection.execute(self._insert_new(remembered_responses), values).rowcount:
                    known = select(remembered_responses.c.answer).where(
                        remembered_responses.c.tenant == tenant, remembered_responses.c.key == key
                    )
                    return bytes(connection.execute(known).scalar_one())
            entries = _numbered(connection, run_metrics, run_id, new.entries)
            samples = _numbered(connection, run_samples, run_id, new.samples)
            check(*(rows[-1]["bytes_so_far"] if rows else 0 for rows in (entries, samples)))
            for table, rows in ((run_metrics, entries), (run_samples, samples)):
                if rows:
                    connection.execute(insert(table), rows)
            return response

    def run_metrics_after(self, run_id: str, after: int, limit: int) -> list[Row[Any]]:
        """Return the entries of a run after that number."""
        return self._after(run_metrics, run_id, after, limit)

    def run_samples_after(self, run_id: str, after: int, limit: int) -> list[Row[Any]]:
        return self._after(run_samples, run_id, after, limit)

    def _after(self, table: Table, run_id: str, after: int, limit: int) -> list[Row[Any]]:
        """Return rows, at most `PAGE_BYTES` of them, and at least one if there is one."""
        of_run, after = table.c.run_id == run_id, bounded(after)
        with self._read() as connection:
            before = select(func.max(table.c.bytes_so_far)).where(of_run, table.c.number <= after)
            end = (connection.scalar(before) or 0) + PAGE_BYTES
            fits = or_(table.c.bytes_so_far <= end, table.c.number == after + 1)
            query = select(table).where(of_run, table.c.number > after, fits).order_by(table.c.number)
            return list(connection.execute(query.limit(bounded(limit))))


def delete_logged(connection: Connection, run_id: str) -> None:
    """Delete all that was logged for a run that is deleted."""
    for table in (run_metrics, run_samples):
        connection.execute(table.delete().where(table.c.run_id == run_id))


def _numbered(
    connection: Connection, table: Table, run_id: str, rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows with what follows from those before them."""
    if not rows:
        return []
    last = select(func.max(table.c.number), func.max(table.c.bytes_so_far)).where(table.c.run_id == run_id)
    number, size = connection.execute(last).one()
    number, size = number or 0, size or 0
    numbered = []
    for row in rows:
        number += 1
        size += ROW_BYTES + len(orjson.dumps(row))
        numbered.append({**row, "run_id": run_id, "number": number, "bytes_so_far": size})
    return numbered
